"""The launcher ``kubernetes``: manifests for a cluster that starts and keeps the processes itself.

    before the loop   Job               one phase after another as init containers, the parity gate last
    train             JobSet            one pod per node; all restart when one fails
    serve             LeaderWorkerSet   the group's number is the replica; lent engines have a low priority class
    gateway           StatefulSet       its sessions are in memory, so it is addressed by name
    rollouts          Job, indexed      it ends when the run does
    relay             Deployment        the replicas elect the active one themselves
    sandboxes         StatefulSet       privileged: it makes namespaces

There is one folder per region and one for the phases before the loop; each is a Kustomize base, to be applied directly
or through an overlay. Secrets are referenced by name and are in no file. The cluster needs JobSet (jobset.x-k8s.io) and
LeaderWorkerSet (leaderworkerset.x-k8s.io).
"""

import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby

import yaml

from etude.config.fleet import FleetConfig, KubernetesConfig
from etude.errors import ConfigError, ExitCode
from etude.fleet.specs import GroupMember, ProcessSpec, Resources
from etude.run.process_name import NUMBERED, ProcessName
from etude.run.region_stores import PORT_VARIABLE
from etude.types import Json

PHASES, MANIFESTS = "phases", "processes.yaml"
"""The folder of the phases before the loop; the file of each folder with its objects."""
LENT_CLASS = "etude-lent"
"""Priority class of engines on machines that production takes back."""
LENT_PRIORITY = -10
GRACE_S = 30
"""Grace period of a pod in seconds."""
RESTARTS = 100
"""Number of restarts of a trainer or a rollouts process before Kubernetes gives up."""
REPLICA = "REPLICA"
"""Environment variable with a pod's replica number."""
JOB_INDEX, POD_INDEX = "batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index"
INDEX_LABELS = {
    "serve": "leaderworkerset.sigs.k8s.io/group-index",
    "gateway": POD_INDEX,
    "sandboxes": POD_INDEX,
    "rollouts": JOB_INDEX,
    "train": JOB_INDEX,
    "midtrain": JOB_INDEX,
    "sft": JOB_INDEX,
}
"""Command → the pod label with the replica number."""
Manifest = dict[str, Json]


def render_manifests(
    phases: Sequence[ProcessSpec], loop: Sequence[ProcessSpec], fleet: FleetConfig, run: str
) -> dict[str, str]:
    """Write the manifests of a run: file name → YAML. ``run`` is its short name, which is part of all names.

    If one cluster has several regions, the names contain the region too. Raises :class:`~etude.errors.ConfigError` if
    the cluster has no image, or a region the name of the folder of phases.
    """
    cluster = fleet.kubernetes
    if not cluster.image:
        raise ConfigError("kubernetes.image is missing: name the container image that has étude in it")
    if PHASES in fleet.regions_by_name:
        raise ConfigError(
            f"regions: name = {PHASES!r}: the folder of that name has what runs before the loop; rename the region"
        )
    bases = {PHASES: [_phases(phases, cluster, run)]}
    for region, specs in groupby(sorted(loop, key=lambda spec: spec.region), key=lambda spec: spec.region):
        bases[region] = list(_region(list(specs), cluster, f"{run}-{region}" if cluster.region_label else run))
    files = {f"{base}/{MANIFESTS}": documents for base, documents in bases.items()}
    files |= {f"{base}/kustomization.yaml": [_kustomization(cluster)] for base in bases}
    return {name: yaml.dump_all(documents, Dumper=_Plain, sort_keys=False) for name, documents in files.items()}


def _kustomization(cluster: KubernetesConfig) -> Manifest:
    """The Kustomize base, with the settings that users change most often in their standard fields."""
    base: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [MANIFESTS],
        "labels": [{"pairs": {"app.kubernetes.io/part-of": "etude"}}],
        "images": [_image(cluster.image)],
    }
    return base | ({"namespace": cluster.namespace} if "namespace" in cluster.model_fields_set else {})


def _image(reference: str) -> Manifest:
    """The name of an image, which overlays replace, with its tag or digest."""
    place, _, digest = reference.partition("@")
    folder, slash, last = place.rpartition("/")  # a registry port is not a tag
    name, _, tag = last.partition(":")
    image: Manifest = {"name": f"{folder}{slash}{name}"}
    if digest:
        return image | {"digest": digest}
    return image | {"newTag": tag} if tag else image


class _Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML comes without types
    """YAML dumper without anchors and aliases, since people read manifests."""

    def ignore_aliases(self, data: object) -> bool:
        """Return true for every object."""
        return True


def _region(specs: Sequence[ProcessSpec], cluster: KubernetesConfig, run: str) -> Iterable[Manifest]:
    """The objects of one region."""
    if any(spec.is_lent for spec in specs):
        yield {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": LENT_CLASS},
            "value": LENT_PRIORITY,
            "preemptionPolicy": "Never",
            "description": "Engines on machines that production takes back.",
        }
    alike: dict[tuple[str, bool], list[ProcessSpec]] = {}
    for spec in specs:
        alike.setdefault((ProcessName.parse(spec.name).command, spec.is_lent), []).append(spec)
    for (command, is_lent), replicas in alike.items():
        name = f"{run}-{command}{'-lent' if is_lent else ''}"
        pods = PodTemplate(cluster, run, name, command, replicas)
        match command:
            case "train":
                yield pods.job_set()
            case "serve":
                yield pods.leader_worker_set()
            case "rollouts":
                yield pods.job()
            case "relay":
                yield pods.deployment()
            case _:
                yield pods.service()
                yield pods.stateful_set()


class PodTemplate:
    """Pods that differ only in their number, and the objects that manage them."""

    def __init__(
        self, cluster: KubernetesConfig, run: str, name: str, command: str, replicas: Sequence[ProcessSpec]
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._command = command
        self._replicas = replicas
        self._spec = replicas[0]
        self._labels: Manifest = {
            "app.kubernetes.io/name": "etude",
            "app.kubernetes.io/instance": run,
            "app.kubernetes.io/component": name.removeprefix(f"{run}-"),
        }

    def job_set(self) -> Manifest:
        """The nodes of a trainer, which find each other through the name of the first pod."""
        return self.job_set_of([self.replicated_job("")])

    def job_set_of(self, jobs: Sequence[Json]) -> Manifest:
        """Groups of nodes under one name."""
        return self._object("jobset.x-k8s.io/v1alpha2", "JobSet", {
            "network": {"enableDNSHostnames": True, "subdomain": self._name},
            "failurePolicy": {"maxRestarts": RESTARTS, "rules": []},
            "replicatedJobs": [*jobs],
        })  # fmt: skip

    def replicated_job(self, before: str) -> Manifest:
        """One group of nodes, which starts when the group ``before``, if any, is complete."""
        job: Manifest = {"name": self.group, "replicas": 1}
        if before:
            job["dependsOn"] = [{"name": before, "status": "Complete"}]
        return {**job, "template": {"spec": {**self._job_spec(), "backoffLimit": 0}}}

    @property
    def group(self) -> str:
        """The name of these nodes within a job set."""
        return "node" if self._command == "train" else self._command

    def job(self) -> Manifest:
        """Processes that end."""
        return self._object("batch/v1", "Job", {**self._job_spec(), "backoffLimit": RESTARTS})

    def leader_worker_set(self) -> Manifest:
        """Engines; each is currently a group of one pod."""
        return self._object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", {
            "replicas": len(self._replicas),
            "leaderWorkerTemplate": {"size": 1, "workerTemplate": self._pod("Always")},
        })  # fmt: skip

    def stateful_set(self) -> Manifest:
        """Processes that are addressed by their own names."""
        return self._object("apps/v1", "StatefulSet", {
            "serviceName": self._name,
            "replicas": len(self._replicas),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": self._labels},
            "template": self._pod("Always"),
        })  # fmt: skip

    def service(self) -> Manifest:
        """The headless service that gives pods their names."""
        return self._object("v1", "Service", {
            "clusterIP": "None",
            "selector": self._labels,
            "ports": [{"name": "http", "port": self._spec.port}],
        })  # fmt: skip

    def deployment(self) -> Manifest:
        """Processes without a number."""
        return self._object("apps/v1", "Deployment", {
            "replicas": len(self._replicas),
            "selector": {"matchLabels": self._labels},
            "template": self._pod("Always"),
        })  # fmt: skip

    def _object(self, version: str, kind: str, spec: Manifest) -> Manifest:
        metadata: Manifest = {"name": self._name, "namespace": self._cluster.namespace, "labels": self._labels}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _job_spec(self) -> Manifest:
        """One pod per process; an error that no restart repairs fails the whole job."""
        return {
            "completionMode": "Indexed",
            "completions": len(self._replicas),
            "parallelism": len(self._replicas),
            "podFailurePolicy": {"rules": [{
                "action": "FailJob",
                "onExitCodes": {"operator": "In", "values": [int(ExitCode.USER_ERROR)]},
            }]},
            "template": self._pod("Never"),
        }  # fmt: skip

    def _pod(self, restart: str) -> Manifest:
        spec, region = self._spec, self._cluster.region_label
        pod: Manifest = {
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [self._container()],
        }
        if region:
            pod["nodeSelector"] = {region: spec.region}
        if spec.is_lent:
            pod["priorityClassName"] = LENT_CLASS
        if spec.group is not None:
            pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchLabels": self._labels}, "topologyKey": "kubernetes.io/hostname"}
            ]}}  # fmt: skip
        return {"metadata": {"labels": self._labels}, "spec": pod}

    def _container(self) -> Manifest:
        """The one container of a pod."""
        spec, environment = self._spec, self._environment()
        container: Manifest = {
            "name": self._command,
            "image": self._cluster.image,
            "command": self._command_line(),
            "env": environment,
            "resources": _resources(spec.resources, self._cluster.gpu_resource),
        }
        if spec.port:
            container["ports"] = [{"name": "http", "containerPort": spec.port}]
            container["readinessProbe"] = {"tcpSocket": {"port": spec.port}, "periodSeconds": 5}
        if self._command == "sandboxes":
            container["securityContext"] = {"privileged": True}
        return container

    def _command_line(self) -> list[Json]:
        """The command, equal for all replicas: the replica number is in the environment."""
        command, first = self._spec.command, ProcessName.parse(self._spec.name).replica
        if self._command not in NUMBERED:
            return [*command]
        number = f"$(({REPLICA} + {first}))" if first else f"${REPLICA}"
        return ["sh", "-c", f"exec {shlex.join(_without_replica(command))} --replica {number}"]

    def _environment(self) -> list[Json]:
        secrets: list[Json] = [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": self._cluster.secret, "key": name, "optional": True}}}
            for name in self._spec.secrets
        ]
        index: Json = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX_LABELS.get(self._command, '')}']"}}
        if self._spec.group is not None:
            return [*secrets, *_rendezvous(self._spec.group, f"{self._name}-{self.group}-0-0.{self._name}", index)]
        number: list[Json] = [{"name": REPLICA, "valueFrom": index}] if self._command in NUMBERED else []
        if self._spec.port and "--port" not in self._spec.command:
            return [*secrets, *number, {"name": PORT_VARIABLE, "value": str(self._spec.port)}]
        return [*secrets, *number]


def _without_replica(command: Sequence[str]) -> list[str]:
    words = [*command]
    if "--replica" in words:
        at = words.index("--replica")
        del words[at : at + 2]
    return words


def _rendezvous(group: GroupMember, host: str, index: Json) -> list[Json]:
    """The environment of a group's members; the rank is the pod's number."""
    environment = group.rendezvous(host)
    return [
        {"name": name, "valueFrom": index} if name == "PET_NODE_RANK" else {"name": name, "value": value}
        for name, value in environment.items()
    ]


def _resources(resources: Resources, gpu: str) -> Manifest:
    requests: Manifest = {"cpu": f"{resources.cpus:g}"}
    limits: Manifest = {}
    if resources.memory_gib:
        requests["memory"] = limits["memory"] = f"{resources.memory_gib:g}Gi"
    if resources.gpus:
        requests[gpu] = limits[gpu] = resources.gpus
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _phases(specs: Sequence[ProcessSpec], cluster: KubernetesConfig, run: str) -> Manifest:
    """One job set with the nodes of each phase as a group; the groups run one after another."""
    phases = groupby(specs, key=lambda spec: ProcessName.parse(spec.name).command)
    pods = [PodTemplate(cluster, run, f"{run}-phases", command, [*nodes]) for command, nodes in phases]
    before = ["", *(one.group for one in pods)]
    return pods[0].job_set_of([one.replicated_job(name) for one, name in zip(pods, before, strict=False)])
