"""Manifests of docs/clusters: core kinds against Kubernetes' schemas, operators' kinds against what there is of theirs.

TrainJob, JobSet and PyTorchJob are read by the models that Kubeflow makes from their schemas, kubeflow-trainer-api and
kubeflow-training. No package has the schema of MPIJob v2beta1: the model of v1 reads the fields that it shares with v1,
and those that v2beta1 has added are compared with a list. Pod templates are core kinds.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from horovod.launch.flags import parse_flags

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'khorovod[clusters]'")

FOLDER = Path(__file__).parents[2] / "docs" / "clusters"
DOCUMENTS = [
    (path.name, document) for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())
]
CORE = ("v1", "batch/v1")
#: The values that fields of an MPIJob may have which v2beta1 has and v1 has not; None for any text.
ONLY_V2BETA1: dict[str, list[Any] | None] = {
    "launcherCreationPolicy": ["AtStartup", "WaitForWorkersReady"],
    "mpiImplementation": ["OpenMPI", "Intel", "MPICH"],
    "runLauncherAsWorker": [True, False],
    "sshAuthMountPath": None,
}


def the(kind: str) -> dict[str, Any]:
    """The only manifest of ``kind``."""
    (document,) = [document for _, document in DOCUMENTS if document["kind"] == kind]
    return document


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def pods_of(value: Any) -> list[dict[str, Any]]:
    """The specifications of pods anywhere in a manifest."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods_of(item)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else [pod for item in value.values() for pod in pods_of(item)]


@pytest.mark.parametrize(("name", "document"), [d for d in DOCUMENTS if d[1]["apiVersion"] in CORE], ids=lambda d: "")
def test_core_kinds_fit_their_schemas(name: str, document: dict[str, Any]) -> None:
    validate(document)
    broken = {**document, "spec": {**document["spec"], "completionsMode": "Indexed"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(broken)


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_kinds_of_the_trainer_fit_its_models(kind: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    model = {"TrainJob": models.TrainerV1alpha1TrainJob, "JobSet": models.JobsetV1alpha2JobSet}[kind]
    document = the(kind)
    assert model.from_dict(document).to_dict() == document, "a field that it does not know is dropped"
    unknown = {**document, "spec": {**document["spec"], "replicas": 3}}
    assert model.from_dict(unknown).to_dict() == document
    with pytest.raises(ValueError, match="suspend"):
        model.from_dict({**document, "spec": {**document["spec"], "suspend": "perhaps"}})
    for job in document["spec"].get("replicatedJobs", []):
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job["template"]["spec"]})


def validate_pods(document: dict[str, Any]) -> None:
    pods = pods_of(document)
    for pod in pods:
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod})
    assert pods


@pytest.fixture
def read() -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Reads a job with its model of kubeflow-training, and returns what the model knows of it."""
    models = pytest.importorskip("kubeflow.training.models")
    client = pytest.importorskip("kubernetes.client")
    with pytest.MonkeyPatch.context() as patch:
        for name in dir(models):  # the client looks for classes among its own
            patch.setattr(client.models, name, getattr(models, name), raising=False)
        api = client.ApiClient()

        def known(document: dict[str, Any]) -> Any:
            answer = SimpleNamespace(data=json.dumps(document))
            return api.sanitize_for_serialization(api.deserialize(answer, f"KubeflowOrgV1{document['kind']}"))

        yield known


def test_a_pytorch_job_fits_its_model(read: Callable[[dict[str, Any]], Any]) -> None:
    document = deepcopy(the("PyTorchJob"))
    validate_pods(document)
    assert {pod["containers"][0]["name"] for pod in pods_of(document)} == {"pytorch"}
    assert read(document) == document, "a field that it does not know is dropped"
    del document["spec"]["pytorchReplicaSpecs"]
    with pytest.raises(ValueError, match="pytorch_replica_specs"):
        read(document)


def test_an_mpi_job_fits_the_model_of_v1_and_the_fields_that_v2beta1_has_added(
    read: Callable[[dict[str, Any]], Any],
) -> None:
    document = deepcopy(the("MPIJob"))
    assert document["apiVersion"] == "kubeflow.org/v2beta1"
    assert set(document["spec"]["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    validate_pods(document)
    for name, values in ONLY_V2BETA1.items():
        value = document["spec"].pop(name, None)
        assert value is None or value in (values or [value])
    assert read(document) == document, "a field that it does not know is dropped"
    document["spec"]["runPolicy"]["suspend"] = "perhaps"
    assert read(document) != document, "a value of another type is converted"


def test_the_indexed_job_says_three_things_that_belong_together() -> None:
    service, job = [document for name, document in DOCUMENTS if name == "indexed-job.yaml"]
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    environ = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    assert environ["HOROVOD_SIZE"]["value"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert environ["HOROVOD_SECRET_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "train-key"


def test_the_commands_of_the_page_name_what_the_manifests_have() -> None:
    page = (FOLDER / "kubernetes.md").read_text(encoding="utf-8")
    (job,) = [document for name, document in DOCUMENTS if name == "indexed-job.yaml" and document["kind"] == "Job"]
    (pod,) = pods_of(job)
    (key,) = [each["valueFrom"]["secretKeyRef"] for each in pod["containers"][0]["env"] if "valueFrom" in each]
    assert (
        f"$ kubectl create secret generic {key['name']} --from-literal={key['key']}=$(openssl rand -hex 32)\n" in page
    )
    assert f"$ kubectl logs -f -l job-name={job['metadata']['name']} --prefix\n" in page
    (line,) = re.findall(r"^\$ horovodrun (.*)$", page, re.MULTILINE)
    options = parse_flags(shlex.split(line), "v")
    assert options.command == ("python", "train.py") and options.elastic is not None
    assert (options.elastic.minimum, options.elastic.maximum, options.elastic.slots) == (2, 8, 2)
    assert options.elastic.script == "/etc/mpi/discover_hosts.sh"
