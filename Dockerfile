# The image that the hosts of a TPU slice run (docs/launch.md): this repository, and what it needs, for one Python.
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /shardwright

# The dependencies alone, in a layer of their own: a change of the code leaves several GB as they are. gcsfs and s3fs
# are for outputs in gs:// and s3://.
COPY pyproject.toml README.md ./
RUN pip install '.[tpu]' 'gcsfs>=2025.3' 's3fs>=2025.3' && pip uninstall --yes shardwright

COPY . .
RUN pip install --no-deps --editable .

CMD ["python", "scripts/train.py", "--help"]
