"""The manifests of docs/kubernetes, and the pods that their controllers create from them.

A controller adds variables and names to its pods. Each of these functions returns, for one kind of
job, the command and environment with which the container of a pod is started.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

FOLDER = Path(__file__).parent.parent.parent / "docs" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
Yaml = dict[str, Any]


@attrs.frozen
class Container:
    """The container of a pod. `own_name` is the second name of the pod in its own /etc/hosts."""

    pod: str
    own_name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    grace: float
    shared_memory: str
    mount: str


def documents(name: str) -> list[Yaml]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(name: str, kind: str) -> Yaml:
    (found,) = (document for document in documents(name) if document["kind"] == kind)
    return found


# -- validation by the models of generated clients ---------------------------------------------


def build(name: str, models: Iterable[Any], value: Any) -> Any:
    """Create the model of this name from a value of a manifest.

    Raises:
        ValueError: a field that the model does not have, lacks or has with another type.
    """
    if match := re.fullmatch(r"list\[(.*)\]", name):
        return [build(match[1], models, one) for one in _typed(value, list, name)]
    if match := re.fullmatch(r"dict\(str, (.*)\)", name):
        return {k: build(match[1], models, one) for k, one in _typed(value, dict, name).items()}
    plain: Mapping[str, Any] = {"str": str, "int": int, "bool": bool, "object": (str, int)}
    if name in plain:
        return _typed(value, plain[name], name)
    model = next(getattr(m, name) for m in models if hasattr(m, name))
    names = {json: attribute for attribute, json in model.attribute_map.items()}
    given = {}
    for key, one in _typed(value, dict, name).items():
        if key not in names:
            raise ValueError(f"{name} has no field {key}; it has {', '.join(sorted(names))}")
        given[names[key]] = build(model.openapi_types[names[key]], models, one)
    return model(**given)


def _typed(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r} is no {name}")
    return value


# -- the containers of each kind of job --------------------------------------------------------


def indexed_job(job: Yaml, index: int) -> Container:
    """Return the container of a pod of a Job with completionMode Indexed."""
    name, template = job["metadata"]["name"], job["spec"]["template"]
    fields = {
        "metadata.labels['batch.kubernetes.io/job-name']": name,
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
    }
    pod = f"{name}-{index}"
    own = f"{pod}.{template['spec']['subdomain']}.default.svc.cluster.local"
    return _container(template, pod, own, fields, {"JOB_COMPLETION_INDEX": str(index)})


def pytorch_job(job: Yaml, index: int) -> Container:
    """Return the container of a worker of a PyTorchJob with an elasticPolicy and no master."""
    name, spec = job["metadata"]["name"], job["spec"]
    (replicas,) = spec["pytorchReplicaSpecs"].values()
    policy = spec["elasticPolicy"]
    added = {
        "PYTHONUNBUFFERED": "0",
        "PET_RDZV_ENDPOINT": f"{name}-worker-0:{policy.get('rdzvPort', 23456)}",
        "PET_RDZV_BACKEND": policy.get("rdzvBackend", "c10d"),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": policy.get("maxRestarts"),
        "PET_RDZV_ID": policy.get("rdzvId"),
        "PET_RDZV_CONF": ",".join(f"{c['key']}={c['value']}" for c in policy.get("rdzvConf", ())),
    }
    pod = f"{name}-worker-{index}"
    variables = {key: str(value) for key, value in added.items() if value not in (None, "")}
    return _container(replicas["template"], pod, pod, {}, variables)


def with_master(container: Container, rank: int, pods: int) -> Container:
    """Add the node-level variables that newer operators add if the job has a master."""
    node = {
        "MASTER_ADDR": "train-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(pods),
        "RANK": str(rank),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(rank),
    }
    return attrs.evolve(container, environment={**container.environment, **node})


def train_job(runtime: Yaml, job: Yaml, index: int) -> Container:
    """Return the container of a node of a TrainJob (Trainer v2), with the pod of its runtime."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    merged = {**container, **{k: trainer[k] for k in ("args", "command") if k in trainer}}
    merged["env"] = [*container.get("env", []), *trainer.get("env", [])]
    template = {"spec": {**template["spec"], "containers": [merged]}}
    added = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", "auto")),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(index),
    }
    pod = f"{name}-node-0-{index}"
    return _container(template, pod, f"{pod}.{name}.default.svc.cluster.local", {}, added)


def runai_arguments() -> list[str]:
    """Return the arguments of the command line of Run:ai."""
    text = (FOLDER / "runai-submit.sh").read_text().replace("\\\n", " ")
    return shlex.split(text, comments=True)


def runai_job() -> Yaml:
    """Return the PyTorchJob that Run:ai creates from its command line."""
    arguments = runai_arguments()
    end = arguments.index("--")
    flags = [
        (text, arguments[at + 1]) for at, text in enumerate(arguments[:end]) if text[:2] == "--"
    ]
    of: Callable[[str], list[str]] = lambda flag: [v for f, v in flags if f == flag]  # noqa: E731
    env = [dict(zip(("name", "value"), e.split("=", 1), strict=True)) for e in of("--environment")]
    (claim,) = (dict(p.split("=") for p in v.split(",")) for v in of("--existing-pvc"))
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "pvc", "persistentVolumeClaim": {"claimName": claim["claimname"]}},
    ]
    container = {
        "name": "pytorch",
        "image": of("--image")[0],
        "command": arguments[end + 1 :],
        "env": env,
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "pvc", "mountPath": claim["path"]},
        ],
    }
    worker = {
        "replicas": int(of("--workers")[0]),
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }
    (least,), (most,) = of("--min-replicas"), of("--max-replicas")
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": arguments[4]},
        "spec": {
            "elasticPolicy": {"minReplicas": int(least), "maxReplicas": int(most)},
            "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def _container(
    template: Yaml, pod: str, own_name: str, fields: Mapping[str, str], added: Mapping[str, str]
) -> Container:
    spec = template["spec"]
    (container,) = spec["containers"]
    environment: dict[str, str] = {"HOSTNAME": pod}
    for one in container.get("env", []):
        value = one.get("value")
        if value is None:
            value = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        environment[one["name"]] = expand(value, environment)
    environment.update(added)
    command = (*container.get("command", ()), *container.get("args", ()))
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
    shared = mounts.pop("/dev/shm")["emptyDir"]
    assert shared["medium"] == "Memory"
    ((mount, claim),) = mounts.items()
    assert claim["persistentVolumeClaim"]["claimName"] == "checkpoints"
    return Container(
        pod=pod,
        own_name=own_name,
        command=tuple(expand(argument, environment) for argument in command),
        environment=environment,
        grace=float(spec.get("terminationGracePeriodSeconds", 30)),
        shared_memory=shared["sizeLimit"],
        mount=mount,
    )


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Expand $(NAME) as a kubelet does. Unknown names are not changed."""
    return re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), text)
