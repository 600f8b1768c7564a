"""docs/kubernetes is valid for the client libraries of its controllers and for elasticrun."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import attrs
import pytest
from pages import read_page

pytest.importorskip("yaml", reason="needs PyYAML: make test-integrations")
kubernetes = pytest.importorskip("kubernetes.client.models")
kubeflow = pytest.importorskip("kubeflow.training.models")
trainer = pytest.importorskip("kubeflow_trainer_api.models")

from manifests import (  # noqa: E402
    FILES,
    Container,
    Yaml,
    build,
    documents,
    expand,
    indexed_job,
    of_kind,
    pytorch_job,
    runai_arguments,
    runai_job,
    train_job,
    with_master,
)

from elasticlib.launch.arguments import Launch, parse_launch  # noqa: E402
from elasticlib.launch.cli import _parser  # noqa: E402
from elasticlib.workers.spec import Module  # noqa: E402

MODELS = {
    "Service": "V1Service",
    "Deployment": "V1Deployment",
    "Job": "V1Job",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "PyTorchJob": "KubeflowOrgV1PyTorchJob",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
VERSIONS = {
    "Service": "v1",
    "Deployment": "apps/v1",
    "Job": "batch/v1",
    "PodDisruptionBudget": "policy/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "PyTorchJob": "kubeflow.org/v1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
ALL = [pytest.param(d, id=f"{f.name}-{d['kind']}") for f in FILES for d in documents(f.name)]
DNS_TTL_S = 30.0  # the default of kubeadm, for positive and for negative answers
RESERVED = {
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
}
# Flags of `runai training pytorch submit` in the reference of its command line, and switches.
RUNAI_FLAGS = {
    "--project",
    "--image",
    "--workers",
    "--min-replicas",
    "--max-replicas",
    "--cpu-core-request",
    "--cpu-memory-request",
    "--existing-pvc",
    "--environment",
}
RUNAI_SWITCHES = {"--no-master", "--large-shm", "--command"}

RUNTIME, TRAIN_JOB = (of_kind("trainjob.yaml", k) for k in ("ClusterTrainingRuntime", "TrainJob"))
JOB = of_kind("indexed-job.yaml", "Job")
PYTORCH_JOB = of_kind("pytorchjob.yaml", "PyTorchJob")
CONTAINERS = {
    "indexed-job": indexed_job(JOB, 1),
    "pytorchjob": pytorch_job(PYTORCH_JOB, 1),
    "trainjob": train_job(RUNTIME, TRAIN_JOB, 1),
    "runai": pytorch_job(runai_job(), 1),
}


def parse_container(container: Container) -> Launch:
    assert container.command[0] == "elasticrun"
    return parse_launch(container.command[1:], container.environment)


def validate(document: Yaml) -> None:
    """Raise ValueError if the document does not match the model of its kind."""
    name = MODELS[document["kind"]]
    if not hasattr(trainer, name):
        build(name, (kubeflow, kubernetes), document)
        return
    # The model omits unknown fields.
    if (kept := getattr(trainer, name).from_dict(document).to_dict()) != document:
        raise ValueError(f"{name} has no such field: {kept} is not {document}")


@pytest.mark.parametrize("document", ALL)
def test_a_manifest_has_only_fields_of_its_kind(document: Yaml) -> None:
    assert document["apiVersion"] == VERSIONS[document["kind"]]
    validate(document)


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all mappings whose keys are fields, not labels, requests or kinds."""
    if isinstance(value, list):
        return [below for n, one in enumerate(value) for below in list_paths(one, (*path, n))]
    if not isinstance(value, dict) or (path and path[-1] in FREE):
        return []
    nested = [below for key, one in value.items() for below in list_paths(one, (*path, key))]
    return [path, *nested]


FREE = ("labels", "requests", "selector", "matchLabels", "pytorchReplicaSpecs")


@pytest.mark.parametrize("document", ALL)
def test_a_misspelled_field_is_found(document: Yaml) -> None:
    all_paths = list_paths(document)
    assert len(all_paths) > 2
    for path in all_paths:
        (again,) = [d for f in FILES for d in documents(f.name) if d == document]
        parent = again
        for key in path:
            parent = parent[key]
        parent["misspelt"] = "x"
        with pytest.raises(ValueError, match="misspelt"):
            validate(again)


@pytest.mark.parametrize("name", CONTAINERS)
def test_elasticrun_accepts_the_command_and_variables_of_each_manifest(name: str) -> None:
    container = CONTAINERS[name]
    launch = parse_container(container)
    options = launch.options
    assert (options.job.min_nodes, options.job.max_nodes) == (1, 3 if name == "trainjob" else 4)
    assert (options.workers.count, options.job.max_restarts, options.rendezvous.run_id) == (
        1,
        3,
        "train",
    )
    endpoint = {
        "indexed-job": "train-0.train:29400",
        "trainjob": "train-node-0-0.train:29500",
    }
    assert options.rendezvous.endpoints == (endpoint.get(name, "train-worker-0:23456"),)
    assert launch.entrypoint == Module(
        "elasticlib.examples.train_text", (f"--checkpoint-dir={container.mount}",)
    )
    assert launch.warnings == ()


@pytest.mark.parametrize("name", CONTAINERS)
def test_pods_get_enough_time_to_save_before_they_are_killed(name: str) -> None:
    options = parse_container(CONTAINERS[name]).options
    agent = options.agent
    # All workers save at the same time, and the node with the store serves until they have.
    saved = agent.checkpoint_grace + agent.shutdown_timeout_s
    # Pods of Run:ai have 30 s, so there is no time for a process that does not end by SIGKILL.
    reaped = 0.0 if name == "runai" else agent.kill_timeout
    assert saved + reaped + options.rendezvous.timeouts.close_timeout < CONTAINERS[name].grace


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_last_call_is_as_long_as_dns_entries_can_be_stale(
    name: str,
) -> None:
    assert parse_container(CONTAINERS[name]).options.job.last_call_timeout == DNS_TTL_S


def test_master_variables_of_the_operator_do_not_change_the_launch() -> None:
    """RANK and similar variables describe the node. The agent ignores them."""
    plain = CONTAINERS["pytorchjob"]
    without, with_variables = parse_container(plain), parse_container(with_master(plain, 2, 3))
    assert with_variables.options.rendezvous.endpoints == without.options.rendezvous.endpoints
    assert (with_variables.options.workers.count, with_variables.options.job.max_nodes) == (1, 4)
    assert with_variables.options.rendezvous.node_rank == 2


def test_an_empty_standalone_variable_selects_a_single_node() -> None:
    switched = {"PET_STANDALONE": "", "PET_NNODES": "1:1"}
    environment = {**CONTAINERS["pytorchjob"].environment, **switched}
    launch = parse_launch(CONTAINERS["pytorchjob"].command[1:], environment)
    assert launch.settings["standalone"]
    assert launch.options.rendezvous.is_single_node


def test_the_indexed_job_can_be_resized_and_its_pods_replaced() -> None:
    spec = JOB["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    drained = parse_container(CONTAINERS["indexed-job"]).options.agent.drain_exit_code
    for job in (spec, RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]):
        pod = job["template"]["spec"]
        # The Job controller accepts a podFailurePolicy only with these values.
        assert (pod["restartPolicy"], job["podReplacementPolicy"]) == ("Never", "Failed")
        rules = job["podFailurePolicy"]["rules"]
        # A failure of one pod, such as exit code 2, does not end the job.
        assert {rule["action"] for rule in rules} == {"Ignore"}
        assert job["backoffLimitPerIndex"] > 0
        (codes,) = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
        assert codes["values"] == [drained]
        assert codes["containerName"] in {container["name"] for container in pod["containers"]}


def test_names_in_the_indexed_job_refer_to_each_other() -> None:
    service, budget = (of_kind("indexed-job.yaml", k) for k in ("Service", "PodDisruptionBudget"))
    name, labels = JOB["metadata"]["name"], {"batch.kubernetes.io/job-name": "train"}
    assert name == "train"
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == JOB["spec"]["template"]["spec"]["subdomain"]
    port = service["spec"]["ports"][0]["port"]
    assert parse_container(CONTAINERS["indexed-job"]).options.rendezvous.endpoint.endswith(
        f":{port}"
    )


def test_the_separate_store_serves_the_job_and_its_service_selects_it() -> None:
    service, deployment = (of_kind("store.yaml", kind) for kind in ("Service", "Deployment"))
    spec, name = deployment["spec"], service["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == spec["selector"]["matchLabels"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"][0] == "elasticlib"
    chosen = _parser().parse_args(container["command"][1:])
    assert chosen.job in {
        parse_container(one).options.rendezvous.run_id for one in CONTAINERS.values()
    }
    (port,) = service["spec"]["ports"]
    assert chosen.bind == ("0.0.0.0", port["port"])
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    for text in (f"PET_RDZV_ENDPOINT={name}:{port['port']}", f"--rdzv-endpoint={name}:"):
        assert text in TEXT
    for one in CONTAINERS.values():
        moved = (one.command[0], f"--rdzv-endpoint={name}:{port['port']}", *one.command[1:])
        assert parse_container(attrs.evolve(one, command=moved)).options.rendezvous.endpoints == (
            f"{name}:{port['port']}",
        )


@pytest.mark.parametrize("name", CONTAINERS)
def test_events_are_written_to_the_volume(name: str) -> None:
    container = CONTAINERS[name]
    assert parse_container(container).options.output.log_dir == f"{container.mount}/logs"


def test_the_autoscaler_has_the_limits_of_the_job() -> None:
    spec = of_kind("autoscaler.yaml", "HorizontalPodAutoscaler")["spec"]
    target, policy = spec["scaleTargetRef"], PYTORCH_JOB["spec"]["elasticPolicy"]
    assert (target["kind"], target["apiVersion"]) == ("PyTorchJob", PYTORCH_JOB["apiVersion"])
    assert target["name"] == PYTORCH_JOB["metadata"]["name"]
    for limit in ("minReplicas", "maxReplicas"):
        assert spec[limit] == policy[limit]
    assert "metrics" not in policy


def test_the_trainer_needs_no_variables_except_those_of_the_node() -> None:
    (replicated,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert (replicated["name"], container["name"]) == ("node", "node")
    assert TRAIN_JOB["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]
    for env in (container.get("env", []), TRAIN_JOB["spec"]["trainer"]["env"]):
        assert not {one["name"] for one in env} & RESERVED


def test_the_runai_command_has_only_documented_flags() -> None:
    arguments = runai_arguments()
    assert arguments[:4] == ["runai", "training", "pytorch", "submit"]
    rest = iter(arguments[5 : arguments.index("--")])
    for text in rest:
        assert text in RUNAI_FLAGS | RUNAI_SWITCHES
        if text in RUNAI_FLAGS:
            assert not next(rest).startswith("-")
    least, most = (runai_job()["spec"]["elasticPolicy"][k] for k in ("minReplicas", "maxReplicas"))
    assert least <= runai_job()["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] <= most
    validate(runai_job())


def test_the_example_of_the_manifests_exists() -> None:
    for container in CONTAINERS.values():
        (module,) = re.findall(r"-m (\S+)", " ".join(container.command))
        assert importlib.util.find_spec(module)


# -- docs/kubernetes.md ------------------------------------------------------------------------

TEXT, BLOCKS = read_page("kubernetes.md")
RESIZE = re.compile("kubectl (scale|patch|delete) ")
LINES = [line for _, code in BLOCKS for line in code.splitlines()]


def test_the_page_names_exactly_the_manifest_files() -> None:
    named = re.findall(r"\]\(kubernetes/([\w.-]+)\)", TEXT)
    assert sorted(named) == sorted(path.name for path in FILES[0].parent.iterdir())


def test_the_page_lists_the_requirements_of_the_manifests() -> None:
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in JOB["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {"checkpoints"}
    for text in ("1.31", "`successPolicy`", "`checkpoints`", "ReadWriteMany", "fsGroup"):
        assert text in TEXT


def test_resize_commands_of_the_page_are_valid_for_the_manifests() -> None:
    scale, patch, *deletes = (shlex.split(line) for line in LINES if RESIZE.match(line))
    assert scale[2] == f"pytorchjob/{PYTORCH_JOB['metadata']['name']}"
    replicas = int(scale[3].removeprefix("--replicas="))
    assert replicas <= PYTORCH_JOB["spec"]["elasticPolicy"]["maxReplicas"]
    assert patch[2] == f"job/{JOB['metadata']['name']}"
    change = json.loads(patch[4].removeprefix("--patch="))["spec"]
    assert change["completions"] == change["parallelism"]
    validate({**JOB, "spec": {**JOB["spec"], **change}})
    # The names of the pods of a Job end with random letters, so a label selects a pod.
    of_job, of_pytorch_job = deletes
    labels = dict(one.split("=") for one in of_job[3].removeprefix("--selector=").split(","))
    prefix = "batch.kubernetes.io/job-"
    index = int(labels.pop(f"{prefix}completion-index"))
    assert labels == {f"{prefix}name": JOB["metadata"]["name"]}
    assert index < change["completions"]
    pods = {f"pod/{pytorch_job(PYTORCH_JOB, index).pod}" for index in range(replicas)}
    assert of_pytorch_job[2] in pods


def test_commands_of_the_page_for_a_job_with_a_master_use_its_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    environment = with_master(CONTAINERS["pytorchjob"], 1, 2).environment
    environment = {k: v for k, v in environment.items() if "RDZV" not in k} | {"PET_NNODES": "2"}
    static, elastic = (
        parse_launch(expand(line, environment).split()[1:], environment).options
        for line in LINES
        if line.startswith("elasticrun")
    )
    assert (static.rdzv_backend, static.node_rank) == ("static", 1)
    assert (elastic.rdzv_backend, elastic.min_nodes, elastic.max_nodes) == ("tcp", 1, 2)
    assert static.rdzv_endpoint == elastic.rdzv_endpoint == "train-master-0:23456"
