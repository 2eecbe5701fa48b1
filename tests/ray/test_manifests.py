"""The manifests under deploy/ fit Kubernetes, Serve and the commands that they start."""

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]
from tests.cli.program import quire

from quire.cli.ray_options import parse

DEPLOY = Path(__file__).parents[2] / "deploy"
[DEPLOYMENT, SERVICE] = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
RAY_SERVICE = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
SERVE = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])
CLUSTER = RAY_SERVICE["spec"]["rayClusterConfig"]
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def pod_templates() -> list[Any]:
    groups = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def check(document: dict[str, Any]) -> None:
    """Against Kubernetes' own schema, in which unknown fields are errors."""
    validator = pytest.importorskip("kubernetes_validate")  # make test-ray
    validator.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("document", [DEPLOYMENT, SERVICE], ids=lambda one: str(one["kind"]))
def test_the_plain_manifest_fits_kubernetes(document: dict[str, Any]) -> None:
    check(document)
    wrong = {**document, "spec": {**document["spec"], "replica": 2}}
    with pytest.raises(Exception, match="replica"):
        check(wrong)


def pod(template: dict[str, Any]) -> dict[str, Any]:
    about = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
    return {**about, "template": template}


@pytest.mark.parametrize("template", pod_templates())
def test_the_clusters_pods_fit_kubernetes(template: dict[str, Any]) -> None:
    check(pod(template))
    [container] = template["spec"]["containers"]
    for wrong in (
        {**container, "ressources": {}},
        {**container, "ports": [{"containerPort": "8000"}]},
    ):
        spec = {**template["spec"], "containers": [wrong]}
        with pytest.raises(Exception, match=r"ressources|8000"):
            check(pod({**template, "spec": spec}))


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


# What KubeRay's ray.io/v1 knows of a RayService, as far as the manifest needs it; pods are
# Kubernetes' own, and the serveConfigV2 is Serve's.
_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_STARTED = {"type": "object", "additionalProperties": _TEXT}
_GROUP: dict[str, Any] = {"rayStartParams": _STARTED, "template": {"type": "object"}}
_COUNTS = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), _COUNT)
RAY_SERVICE_SCHEMA = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_object(("name",), name=_TEXT),
    spec=_object(
        ("serveConfigV2", "rayClusterConfig"),
        serveConfigV2=_TEXT,
        rayClusterConfig=_object(
            ("headGroupSpec",),
            rayVersion=_TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=_object(("template", "rayStartParams"), **_GROUP),
            workerGroupSpecs={
                "type": "array",
                "items": _object(
                    ("groupName", "template", "rayStartParams"),
                    groupName=_TEXT,
                    **_COUNTS,
                    **_GROUP,
                ),
            },
        ),
    ),
)


def _changed(document: Any, path: tuple[str | int, ...], value: object) -> Any:
    made = copy.deepcopy(document)
    place = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return made


CONFIG = ("spec", "rayClusterConfig")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("apiVersion",), "ray.io/v2"),
        (("spec", "serveConfig"), ""),
        ((*CONFIG, "workerGroupSpec"), []),
        ((*CONFIG, "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        ((*CONFIG, "workerGroupSpecs", 0, "maxReplicas"), "8"),
        ((*CONFIG, "workerGroupSpecs", 0, "max_replicas"), 8),
    ],
)
def test_the_ray_service_fits_kuberay_and_a_wrong_field_does_not(
    path: tuple[str | int, ...], value: object
) -> None:
    jsonschema.validate(RAY_SERVICE, RAY_SERVICE_SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(_changed(RAY_SERVICE, path, value), RAY_SERVICE_SCHEMA)


def test_the_container_starts_the_server_with_options_there_are() -> None:
    known = set(re.findall(r"^  (--[a-z-]+)", quire("serve", "--help").out, re.M))
    used = [word for word in CONTAINER["args"] if word.startswith("--")]
    assert used and set(used) <= known


def test_probes_ask_paths_of_the_server_and_the_service_finds_it() -> None:
    probed = {name: CONTAINER[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert probed["livenessProbe"]["path"] == "/health"
    assert probed["readinessProbe"]["path"] == "/ready"
    [port] = CONTAINER["ports"]
    assert {one["port"] for one in probed.values()} == {port["name"]}
    assert SERVICE["spec"]["ports"][0]["targetPort"] == port["name"]
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"].items() <= labels.items()


def test_a_pod_may_drain_before_it_is_killed() -> None:
    args = CONTAINER["args"]
    drain_s = int(args[args.index("--drain-timeout") + 1])
    pause_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] > pause_s + drain_s + 5


def test_keys_come_from_secrets_and_reach_the_ingress_alone() -> None:
    [keys] = [volume for volume in POD["volumes"] if volume["name"] == "keys"]
    assert keys["secret"]["secretName"] == "quire-keys"
    head, worker = (template["spec"]["containers"][0] for template in pod_templates())
    assert head["envFrom"] == [{"secretRef": {"name": "quire-key"}}]
    assert "envFrom" not in worker


def test_the_application_is_one_that_the_command_takes() -> None:
    [application] = SERVE["applications"]
    args = parse(shlex.split(application["args"]["command"]))
    assert (args.host, args.port) == (SERVE["http_options"]["host"], SERVE["http_options"]["port"])
    [group] = CLUSTER["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert args.gpus <= float(resources["limits"]["nvidia.com/gpu"])
    assert args.cpus <= float(resources["requests"]["cpu"])
    assert args.max_replicas <= group["maxReplicas"], "a replica a worker"
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > args.drain_timeout + 5


def test_serve_takes_the_configuration_and_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pytest.importorskip("ray.serve.schema")  # make test-ray
    monkeypatch.setenv("QUIRE_API_KEY", "sk-of-the-test-0123456789abcdef")
    found = schema.ServeDeploySchema.model_validate(SERVE).applications[0]
    for wrong in ({**SERVE, "applications": 1}, {**SERVE, "http_options": {"port": "a port"}}):
        with pytest.raises(ValueError):
            schema.ServeDeploySchema.model_validate(wrong)
    module, _, name = found.import_path.partition(":")
    build = getattr(pytest.importorskip(module), name)
    assert build(found.args)._bound_deployment.name == "ingress"
