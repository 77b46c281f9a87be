# The image that the hosts of a TPU slice run (docs/launch.md): this repository, and what it needs, for one Python.
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /shardwright

# The dependencies alone, in a layer of their own: a change of the code leaves several GB as they are.
COPY pyproject.toml ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
more = project['optional-dependencies']; \
print(*project['dependencies'], *more['tpu'], *more['stores'], sep='\n')" > /tmp/needs.txt \
    && pip install --requirement /tmp/needs.txt

COPY . .
RUN pip install --no-deps --editable .

CMD ["python", "scripts/train.py", "--help"]
