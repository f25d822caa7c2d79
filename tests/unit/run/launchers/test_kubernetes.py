"""Manifests are valid by Kubernetes' own schemas, match the fleet, and contain no secret."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from etude.config.fleet import FleetConfig
from etude.config.loading import load_fleet
from etude.config.recipe import RunConfig
from etude.config.training import ParallelConfig
from etude.errors import ConfigError
from etude.run.fleet_plan import plan_loop, plan_phases
from etude.run.launchers.kubernetes import render_manifests

EXAMPLE = Path(__file__).parents[4] / "examples" / "fleet" / "thousand-machines.toml"
VERSION = "1.32"
Manifest: TypeAlias = dict[str, Any]
LEADER_WORKER_SET = yaml.safe_load((Path(__file__).parents[3] / "support" / "leader_worker_set.yaml").read_text())
"""The schema of a LeaderWorkerSet's spec: its own, which no package has."""


def render_files(fleet: FleetConfig) -> dict[str, str]:
    config = RunConfig(parallel=ParallelConfig(dp=8 * fleet.trainer.nodes))
    run = fleet.home_region.store
    return render_manifests(plan_phases(config, fleet, run), plan_loop(config, fleet, run), fleet, "fix-7")


def render(fleet: FleetConfig) -> dict[str, list[Manifest]]:
    """Base → its objects."""
    files = render_files(fleet).items()
    return {name.removesuffix("/processes.yaml"): list(yaml.safe_load_all(text)) for name, text in files
            if name.endswith("/processes.yaml")}  # fmt: skip


def on_cluster(fleet: FleetConfig, **keys: str) -> FleetConfig:
    return fleet.model_copy(update={"kubernetes": fleet.kubernetes.model_copy(update=keys)})


@pytest.fixture(scope="module")
def manifests() -> dict[str, list[Manifest]]:
    return render(load_fleet(EXAMPLE))


def validate(manifest: Manifest) -> None:
    """Raise for a manifest that a cluster would refuse: wrong types, missing and unknown fields."""
    match manifest["kind"]:
        case "JobSet":
            JobsetV1alpha2JobSet.from_dict(manifest)
            for job in manifest["spec"]["replicatedJobs"]:
                validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]})
        case "LeaderWorkerSet":
            jsonschema.validate(manifest["spec"], closed(LEADER_WORKER_SET))
            pod = manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            validate({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "pod"}})
        case _:
            kubernetes_validate.validate(manifest, VERSION, strict=True)


def closed(schema: Manifest) -> Manifest:
    """A schema that takes no unknown fields, as a cluster does when it is strict."""
    parts = schema.get("properties")
    if parts is None:
        return schema
    return {**schema, "additionalProperties": False, "properties": {name: closed(part) for name, part in parts.items()}}


def test_each_object_is_one_that_its_schema_takes(manifests: dict[str, list[Manifest]]) -> None:
    for objects in manifests.values():
        for manifest in objects:
            validate(manifest)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}})
    for spec in ({"leaderWorkerTemplate": {"workerTemplate": {}, "szie": 1}}, {"leaderWorkerTemplate": {"size": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            validate({"kind": "LeaderWorkerSet", "spec": spec})


def test_there_is_a_file_for_each_region_with_what_runs_there(manifests: dict[str, list[Manifest]]) -> None:
    kinds = {name: sorted(f"{each['kind']} {each['metadata']['name']}" for each in objects)
             for name, objects in manifests.items()}  # fmt: skip
    assert kinds == {
        "phases": ["JobSet fix-7-phases"],
        "us-east": [
            "Job fix-7-rollouts", "JobSet fix-7-train", "LeaderWorkerSet fix-7-serve", "Service fix-7-gateway",
            "Service fix-7-sandboxes", "StatefulSet fix-7-gateway", "StatefulSet fix-7-sandboxes",
        ],
        **{region: [
            "Deployment fix-7-relay", "LeaderWorkerSet fix-7-serve", "LeaderWorkerSet fix-7-serve-lent",
            "PriorityClass etude-lent", "Service fix-7-gateway", "Service fix-7-sandboxes",
            "StatefulSet fix-7-gateway", "StatefulSet fix-7-sandboxes",
        ] for region in ("us-west", "eu-west")},
        "ap-south": [
            "Deployment fix-7-relay", "LeaderWorkerSet fix-7-serve", "Service fix-7-gateway",
            "Service fix-7-sandboxes", "StatefulSet fix-7-gateway", "StatefulSet fix-7-sandboxes",
        ],
    }  # fmt: skip


def test_the_trainers_nodes_meet_at_the_first_and_each_has_a_machine(manifests: dict[str, list[Manifest]]) -> None:
    trainer = next(each for each in manifests["us-east"] if each["kind"] == "JobSet")
    job = trainer["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert (job["completions"], environment["PET_NNODES"]) == (128, "128")
    assert environment["PET_RDZV_ENDPOINT"] == "fix-7-train-node-0-0.fix-7-train:29400"
    assert container["command"] == ["etude", "train", "--run", "s3://acme-us-east/runs/fix-7"]
    assert "podAntiAffinity" in job["template"]["spec"]["affinity"]


def test_phases_follow_each_other_on_the_machines_of_what_they_are_like(manifests: dict[str, list[Manifest]]) -> None:
    (phases,) = manifests["phases"]
    jobs = {job["name"]: job for job in phases["spec"]["replicatedJobs"]}
    assert [(name, job.get("dependsOn")) for name, job in jobs.items()] == [
        ("midtrain", None), ("parity", [{"name": "midtrain", "status": "Complete"}]),
    ]  # fmt: skip
    assert [job["template"]["spec"]["completions"] for job in jobs.values()] == [128, 1]
    pods = [job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs.values()]
    assert [pod["resources"]["limits"]["nvidia.com/gpu"] for pod in pods] == [8, 8]
    environment = {each["name"]: each.get("value") for each in pods[0]["env"]}
    assert environment["PET_RDZV_ENDPOINT"] == "fix-7-phases-midtrain-0-0.fix-7-phases:29400"


def test_replicas_have_their_numbers_and_lent_ones_go_on_counting(manifests: dict[str, list[Manifest]]) -> None:
    engines = {each["metadata"]["name"]: each["spec"] for each in manifests["eu-west"]
               if each["kind"] == "LeaderWorkerSet"}  # fmt: skip
    assert {name: spec["replicas"] for name, spec in engines.items()} == {"fix-7-serve": 96, "fix-7-serve-lent": 48}
    pods = {name: spec["leaderWorkerTemplate"]["workerTemplate"]["spec"] for name, spec in engines.items()}
    commands = {name: pod["containers"][0]["command"][-1] for name, pod in pods.items()}
    assert commands["fix-7-serve"].endswith("--replica $REPLICA")
    assert commands["fix-7-serve-lent"].endswith("--replica $((REPLICA + 96))")
    assert pods["fix-7-serve-lent"]["priorityClassName"] == "etude-lent"
    hosts = next(each["spec"]["template"] for each in manifests["eu-west"]
                 if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "fix-7-sandboxes")  # fmt: skip
    container = hosts["spec"]["containers"][0]
    command = container["command"][-1]
    assert "--port 8700 --announce s3://acme-eu-west" in command and command.endswith("--replica $REPLICA")
    assert "ETUDE_PORT" not in {each["name"] for each in container["env"]}  # the command names it
    engine = pods["fix-7-serve"]["containers"][0]
    assert {"name": "ETUDE_PORT", "value": "8600"} in engine["env"]


def test_secrets_are_references(manifests: dict[str, list[Manifest]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_RUN_KEY", "very-secret")
    again = render(load_fleet(EXAMPLE))
    assert again == manifests
    assert "very-secret" not in str(again)
    rollouts = next(each for each in again["us-east"] if each["metadata"]["name"] == "fix-7-rollouts")
    key = rollouts["spec"]["template"]["spec"]["containers"][0]["env"][0]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "etude-run", "key": "ETUDE_RUN_KEY", "optional": True}


def test_an_image_is_asked_for() -> None:
    fleet = load_fleet(EXAMPLE)
    with pytest.raises(ConfigError, match=r"kubernetes\.image is missing"):
        render(on_cluster(fleet, image=""))


def test_no_region_takes_the_folder_of_the_phases() -> None:
    fleet = load_fleet(EXAMPLE)
    first, *others = fleet.regions
    named = fleet.model_copy(update={"regions": (*others, first.model_copy(update={"name": "phases"}))})
    named = named.model_copy(update={"home": "phases"} if first.name == fleet.home else {})
    with pytest.raises(ConfigError, match=r"regions: name = 'phases': .* rename the region"):
        render_files(named)


def test_regions_of_one_cluster_share_no_name() -> None:
    bases = render(on_cluster(load_fleet(EXAMPLE), region_label="topology.kubernetes.io/region"))
    names = [(each["kind"], each["metadata"]["name"]) for objects in bases.values() for each in objects
             if each["kind"] != "PriorityClass"]  # fmt: skip
    assert len(set(names)) == len(names)
    assert ("StatefulSet", "fix-7-eu-west-gateway") in names


OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../manifests/us-west, ../manifests/phases]
namespace: research
images:
- name: registry.example.org/etude
  newName: mirror.example.org:5000/etude
  newTag: "1.1"
patches:
- target: {kind: LeaderWorkerSet}
  patch: |-
    - op: add
      path: /spec/leaderWorkerTemplate/workerTemplate/spec/nodeSelector
      value: {pool: h200}
"""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which has Kustomize in it, is not installed")
def test_kustomize_builds_each_base_as_it_is_and_an_overlay(tmp_path: Path) -> None:
    files = render_files(load_fleet(EXAMPLE)) | {"../overlay/kustomization.yaml": OVERLAY}
    for name, text in files.items():
        place = tmp_path / "manifests" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def build(folder: str) -> dict[str, Manifest]:
        built = subprocess.run(["kubectl", "kustomize", str(tmp_path / folder)], capture_output=True, check=True)
        assert built.stderr == b""
        objects = list(yaml.safe_load_all(built.stdout))
        for each in objects:
            validate(each)
            assert each["metadata"]["labels"].pop("app.kubernetes.io/part-of") == "etude"
        return {f"{each['kind']} {each['metadata']['name']}": each for each in objects}

    for base, objects in render(load_fleet(EXAMPLE)).items():
        built = build(f"manifests/{base}")
        as_they_are = {f"{each['kind']} {each['metadata']['name']}": each for each in objects}
        built.get("PriorityClass etude-lent", {"metadata": {}})["metadata"].pop("labels", None)
        assert built == as_they_are
    changed = build("overlay")
    assert {each["metadata"].get("namespace") for each in changed.values()} == {"research", None}
    assert "registry.example.org" not in str(changed)
    assert str(changed).count("'image': 'mirror.example.org:5000/etude:1.1'") == 7
    pods = changed["LeaderWorkerSet fix-7-serve"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    assert pods["nodeSelector"] == {"pool": "h200"}


@pytest.mark.parametrize(
    ("image", "entry"),
    [
        ("etude", {"name": "etude"}),
        ("mirror:5000/etude", {"name": "mirror:5000/etude"}),
        ("mirror:5000/a/etude:1.0", {"name": "mirror:5000/a/etude", "newTag": "1.0"}),
        ("mirror:5000/etude@sha256:" + 64 * "a", {"name": "mirror:5000/etude", "digest": "sha256:" + 64 * "a"}),
    ],
)
def test_each_base_names_what_overlays_change(image: str, entry: Manifest) -> None:
    fleet = on_cluster(load_fleet(EXAMPLE), image=image)
    for name, text in render_files(fleet).items():
        if name.endswith("kustomization.yaml"):
            base = yaml.safe_load(text)
            assert (base["resources"], base["namespace"], base["images"]) == (["processes.yaml"], "training", [entry])
