"""The JobSet: as its schema says, with all hosts of a slice and what they need to find each other."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shardwright.launch.slices import GENERATIONS
from shardwright.xla.chips import CHIPS
from tests.support.launching import jobset, planned, pod, variables


def strict(schema: Any) -> Any:
    """``schema`` with unknown fields refused, as `kubectl apply` refuses them."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    return made


@pytest.fixture(scope="module")
def crd() -> jsonschema.Draft7Validator:
    text = gzip.decompress((Path(__file__).parent / "jobset_crd.json.gz").read_bytes())
    schema = strict(json.loads(text))
    schema["properties"]["metadata"] = {"type": "object"}  # the schema leaves it to Kubernetes
    return jsonschema.Draft7Validator(schema)


CASES: dict[str, dict[str, Any]] = {
    "one slice": {},
    "several slices": {"slices": 4},
    "one host": {"topology": "v6e:2x4"},
    "a queue, on spot": {"queue": "team", "spot": True},
    "a bucket": {"mount": "gs://bucket:/mnt/bucket"},
    "a claim": {"mount": "disk:/mnt/disk", "output_dir": "/mnt/disk/one"},
    "a staging folder": {
        "train": ("--recipe", "mixtral_ep", "--output_dir", "gs://b/o", "--staging_dir", "/dev/shm/s")
    },
    "variables": {"environment": {"HF_HOME": "/mnt/bucket/hub", "WHO": "$(id)"}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_jobset_is_as_the_schema_says(case, crd):
    assert [error.message for error in crd.iter_errors(jobset(**CASES[case]))] == []


@pytest.mark.parametrize("path", ["spec", "spec/failurePolicy", "spec/replicatedJobs/0/template/spec/podFailurePolicy"])
def test_the_schema_refuses_a_field_that_there_is_not(path, crd):
    manifest = copy.deepcopy(jobset())
    place: Any = manifest
    for part in path.split("/"):
        place = place[int(part) if part.isdecimal() else part]
    place["maxRestart"] = 3
    assert any("maxRestart" in error.message for error in crd.iter_errors(manifest))


@pytest.mark.parametrize(
    ("topology", "hosts", "chips", "accelerator"),
    [
        ("v4:2x2x2", 2, 4, "tpu-v4-podslice"),
        ("v5p:2x2x4", 4, 4, "tpu-v5p-slice"),
        ("v5p:4x4x4", 16, 4, "tpu-v5p-slice"),
        ("v5e:4x4", 4, 4, "tpu-v5-lite-podslice"),
        ("v6e:1x1", 1, 1, "tpu-v6e-slice"),
        ("v6e:2x4", 1, 8, "tpu-v6e-slice"),
        ("tpu7x:1x1x1", 1, 1, "tpu7x"),
        ("tpu7x:4x4x4", 16, 4, "tpu7x"),
    ],
)
def test_a_slice_has_a_pod_for_each_host_with_all_its_chips(topology, hosts, chips, accelerator):
    manifest = jobset(topology)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (hosts, hosts)
    assert pod(manifest)["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    shape = topology.partition(":")[2]
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": shape,
    }


def test_every_generation_that_can_be_compiled_for_can_be_launched_on():
    assert set(GENERATIONS) == set(CHIPS)


def test_several_slices_are_as_many_jobs_and_know_the_first_ones_first_pod():
    manifest = jobset(slices=3)
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 3
    env = variables(manifest)
    # a JobSet's pods: NAME-JOB-SLICE-HOST, in a subdomain called as the JobSet
    assert env["MEGASCALE_COORDINATOR_ADDRESS"] == "one-slice-0-0.one"
    assert env["MEGASCALE_NUM_SLICES"] == "3"
    (own,) = [each for each in pod(manifest)["containers"][0]["env"] if each["name"] == "MEGASCALE_SLICE_ID"]
    assert own["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/job-index']"


def test_one_slice_is_told_of_no_others():
    assert not [name for name in variables(jobset()) if name.startswith("MEGASCALE")]


def test_a_pod_asks_no_metadata_server_and_trains_on_no_cpu():
    env = variables(jobset())
    assert (env["TPU_SKIP_MDS_QUERY"], env["PJRT_DEVICE"]) == ("true", "TPU")


def test_a_bucket_is_mounted_if_that_is_asked_for():
    specification = pod(jobset(mount="gs://bucket:/mnt/bucket", output_dir="/mnt/bucket/one"))
    assert specification["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "bucket"
    assert specification["containers"][0]["volumeMounts"] == [{"name": "mounted", "mountPath": "/mnt/bucket"}]
    assert "volumes" not in pod(jobset())


def test_with_a_claim_what_was_compiled_lies_in_the_output_on_it():
    manifest = jobset(mount="disk:/mnt/disk", output_dir="/mnt/disk/one")
    assert variables(manifest)["SHARDWRIGHT_COMPILED"] == "/mnt/disk/one/compiled"
    assert pod(manifest)["volumes"] == [{"name": "mounted", "persistentVolumeClaim": {"claimName": "disk"}}]


def test_the_run_gets_sigterm_itself_and_the_grace_to_save():
    specification = pod(jobset(grace_seconds=90))
    assert specification["terminationGracePeriodSeconds"] == 90
    assert specification["containers"][0]["command"][:2] == ["python", "scripts/train.py"]


def test_kubernetes_puts_no_variable_into_what_the_user_wrote():
    train = ("--output_dir", "gs://bucket/one", "--run_name", "$(HOME) $x")
    manifest = jobset(train=train, environment={"WHO": "$(id)"})
    assert "$$(HOME) $x" in pod(manifest)["containers"][0]["command"]
    assert variables(manifest)["WHO"] == "$$(id)"


def test_only_the_jobset_s_own_pods_connect_to_them():
    plan = planned("jobset")
    policy = yaml.safe_load(plan.files["networkpolicy.yaml"])
    own = {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset()["metadata"]["name"]}}}
    assert policy["spec"] == {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    assert set(plan.files) == {*plan.commands[0][3::2]}, "all that is written is applied"


def test_a_queue_is_kueues_label_and_without_one_there_is_none():
    assert jobset(queue="team")["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert "labels" not in jobset()["metadata"]


def test_spot_asks_for_spot_nodes_with_their_taint_too():
    spec = pod(jobset(spot=True))
    assert spec["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert "cloud.google.com/gke-spot" in [each["key"] for each in spec["tolerations"]]
    assert len(pod(jobset())["tolerations"]) == 1


def test_the_log_that_is_shown_is_the_first_hosts():
    *_, labels = planned("jobset").afterwards[0]
    assert {each.rpartition("/")[2] for each in labels.split(",")} == {
        "jobset-name=one",
        "job-index=0",
        "job-completion-index=0",
    }


def test_a_staging_folder_is_the_nodes_own_so_that_the_next_pod_there_finds_it():
    for words in (("--staging_dir", "/mnt/ssd/s"), ("--staging_dir=/mnt/ssd/s",), ("--staging-dir", "/mnt/ssd/s")):
        made = pod(jobset(train=("--recipe", "mixtral_ep", *words)))
        (mount,) = [each for each in made["containers"][0]["volumeMounts"] if each["mountPath"] == "/mnt/ssd/s"]
        (volume,) = [each for each in made["volumes"] if each["name"] == mount["name"]]
        assert volume["hostPath"]["path"] == "/mnt/ssd/s"
    assert all("hostPath" not in volume for volume in pod(jobset()).get("volumes", []))
