"""The manifests for Kubernetes: valid by the schemas of Kubernetes and of Kubeflow's operator."""

import json

import jsonschema
import pytest
import yaml

from tests.conftest import REPOSITORY

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make setup installs kubernetes-validate")
EXAMPLES = REPOSITORY / "examples"
#: The oldest version with sidecar containers, and the newest that the schemas have.
VERSIONS = ("1.29", kubernetes_validate.latest_version())


def load(name):
    return yaml.safe_load((EXAMPLES / name).read_text())


def strict(schema):
    """Return a schema that allows no other fields than it names."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return closed | {name: strict(part) for name, part in schema.items()}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["kubernetes/job.yaml", "cluster/sidecar.yaml"])
def test_jobs_are_valid(name, version):
    kubernetes_validate.validate(load(name), version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_of_the_pytorchjob_are_valid(version):
    for replicas in load("kubernetes/pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"].values():
        template = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "x"},
            "template": replicas["template"],
        }
        kubernetes_validate.validate(template, version, strict=True)


def test_the_pytorchjob_is_valid():
    schema = json.loads((REPOSITORY / "tests/data/kubernetes/pytorchjob-v1.json").read_text())["schema"]
    jsonschema.validate(load("kubernetes/pytorchjob.yaml"), strict(schema))


def test_a_mistake_is_found():
    job = load("kubernetes/job.yaml")
    job["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="resource"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", ["kubernetes/job.yaml", "kubernetes/pytorchjob.yaml"])
def test_training_and_collector_share_run_home_and_processes(name):
    spec = load(name)["spec"]
    template = spec.get("template") or spec["pytorchReplicaSpecs"]["Master"]["template"]
    pod = template["spec"]
    [collector], [training] = pod["initContainers"], pod["containers"]
    assert pod["shareProcessNamespace"]
    for variable in ("TIDEGAUGE_HOME", "TIDEGAUGE_RUN_ID"):
        assert [one for one in collector["env"] if one["name"] == variable] == [
            one for one in training["env"] if one["name"] == variable
        ]
