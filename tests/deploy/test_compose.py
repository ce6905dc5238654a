"""What docker-compose.yml promises, checked against the code. No container is started here."""

import re
from pathlib import Path
from typing import cast

import click
import pytest
import typer
import yaml
from pydantic_settings import BaseSettings

from api import health
from api.settings import GatewaySettings
from cli import settings as cli_settings
from cli.main import app
from workers.batch_settings import BatchWorkerSettings
from workers.settings import DispatcherSettings, MaintenanceSettings, ReplicaSettings

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()

Service = dict[str, object]
COMPOSE = yaml.safe_load(TEXT)
SERVICES: dict[str, Service] = COMPOSE["services"]
OURS = {name: s for name, s in SERVICES.items() if s["image"] == "headrace:local"}
COMMAND_LINE = {
    value
    for name, value in vars(cli_settings).items()
    if name.isupper() and name != "SERVERS_FILE" and isinstance(value, str)
}
SETTINGS: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "dispatcher": DispatcherSettings,
    "replica": ReplicaSettings,
    "batch-worker": BatchWorkerSettings,
    "maintenance": MaintenanceSettings,
}


def _variables(settings: type[BaseSettings]) -> dict[str, bool]:
    """The variables that a settings class reads, and whether each is required."""
    prefix = settings.model_config.get("env_prefix", "")
    return {
        str(field.validation_alias or prefix + name).upper(): field.is_required()
        for name, field in settings.model_fields.items()
    }


def _environment(name: str) -> dict[str, str]:
    environment = SERVICES[name].get("environment", {})
    assert isinstance(environment, dict)
    return environment


def test_every_process_of_the_service_is_there() -> None:
    assert set(OURS) == {*SETTINGS, "migrate", "register"}


@pytest.mark.parametrize("name", sorted(OURS))
def test_each_command_exists(name: str) -> None:
    program, *path = cast("list[str]", OURS[name]["command"])
    assert program == "headrace"
    command = typer.main.get_command(app)
    for word in path:
        assert hasattr(command, "commands"), f"{word} has no commands"
        command = command.commands[word]
    assert not isinstance(command, click.Group)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_each_variable_is_read_and_each_needed_one_is_given(name: str) -> None:
    known = _variables(SETTINGS[name])
    given = set(_environment(name))
    assert given <= set(known)
    assert {variable for variable, is_required in known.items() if is_required} <= given


def test_a_replicas_sizes_can_be_set_and_are_by_default_those_of_its_settings() -> None:
    environment = _environment("replica")
    example = (ROOT / "deploy" / "compose.env.example").read_text()
    table = (ROOT / "README.md").read_text()
    sizes = {"kv_tokens", "host_kv_tokens", "max_num_seqs", "max_num_batched_tokens"}
    sizes |= {"chunk_size", "inter_token_target_ms", "num_threads", "dtype"}
    for name in sizes:
        variable = f"HEADRACE_{name.upper()}"
        default = ReplicaSettings.model_fields[f"headrace_{name}"].default
        said = (
            default if isinstance(default, str) else f"{default:g}" if default < 1000 else default
        )
        assert environment[variable] == f"${{{variable}:-{said}}}"
        assert f"#{variable}={said}\n" in example
        assert re.search(rf"^\| `{variable}` \| `?{said}`? \|", table, re.MULTILINE)


@pytest.mark.parametrize("name", ["migrate", "register"])
def test_the_command_line_reads_what_its_one_shots_are_given(name: str) -> None:
    assert set(_environment(name)) <= COMMAND_LINE


def test_the_gateway_rings_the_broker_that_the_batch_worker_hears() -> None:
    urls = {_environment(n)["CELERY_BROKER_URL"] for n in ("gateway", "batch-worker")}
    assert len(urls) == 1
    assert urls.isdisjoint({_environment("gateway")["REDIS_URL"]})


def test_the_gateways_health_check_asks_a_path_that_is_served() -> None:
    check = str(SERVICES["gateway"]["healthcheck"])
    match = re.search(r"127\.0\.0\.1:(\d+)(/[a-z/]+)", check)
    assert match is not None
    assert match[1] == _environment("gateway")["HEADRACE_PORT"]
    assert match[2] in {getattr(route, "path", None) for route in health.router.routes}


def test_files_and_weights_lie_where_every_process_looks_for_them() -> None:
    for name in ("gateway", "batch-worker", "maintenance"):
        folder = _environment(name)["HEADRACE_DATA_DIR"]
        assert f"data:{folder}" in SERVICES[name]["volumes"]  # type: ignore[operator]  # YAML
    # A version's row names its folder, so it must be the same folder everywhere.
    store = _environment("register")["HEADRACE_WEIGHT_STORE"]
    assert f"weights:{store}" in SERVICES["register"]["volumes"]  # type: ignore[operator]  # YAML
    for name in ("replica", "gateway", "batch-worker"):
        assert f"weights:{store}:ro" in SERVICES[name]["volumes"]  # type: ignore[operator]  # YAML


def test_only_the_gateway_is_published_and_to_this_machine_alone() -> None:
    published = {name for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway"}
    assert SERVICES["gateway"]["ports"] == ["${HEADRACE_LISTEN:-127.0.0.1:8000}:8000"]
    assert COMPOSE["networks"]["inside"]["internal"] is True
    reach_out = {name for name, s in SERVICES.items() if "outside" in s["networks"]}  # type: ignore[operator]  # YAML
    assert reach_out == {"gateway", "register"}


def test_no_secret_has_a_default_and_each_is_asked_for_in_the_example() -> None:
    used = re.findall(r"\$\{(\w+)(:[?-])?", TEXT)
    # A token that opens doors ends a name; the words that a model computes are no secret.
    secrets = {name for name, _ in used if re.search("PASSWORD|PEPPER|SECRET|TOKEN$", name)}
    assert {how for name, how in used if name in secrets} == {":?"}
    example = (ROOT / "deploy" / "compose.env.example").read_text()
    assert set(re.findall(r"^(\w+)=$", example, re.MULTILINE)) == secrets
    assert set(re.findall(r"^#?(\w+)=", example, re.MULTILINE)) == {name for name, _ in used}


def test_everything_waits_for_what_it_needs() -> None:
    for name in SETTINGS:
        needs = SERVICES[name]["depends_on"]
        assert isinstance(needs, dict)
        assert needs["migrate"] == {"condition": "service_completed_successfully"}
        assert needs["register"] == {"condition": "service_completed_successfully"}
        for store in ("postgres", "valkey"):
            assert needs[store] == {"condition": "service_healthy"}
            assert "healthcheck" in SERVICES[store]


def test_the_transport_is_never_allowed_to_evict() -> None:
    assert "--maxmemory-policy noeviction" in str(SERVICES["valkey"]["command"])


def test_our_containers_run_as_nobody_in_particular_and_change_nothing_of_themselves() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(r"^USER \d+$", dockerfile, re.MULTILINE)
    for service in OURS.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["build"] == {"context": ".", "dockerfile": "deploy/Dockerfile"}


def test_the_image_is_built_from_every_package_and_no_more() -> None:
    ignore = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
    kept = set(re.findall(r"^!([\w.]+)$", ignore, re.MULTILINE))
    for path in kept:
        assert (ROOT / path).exists(), path
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= kept
