"""`docker-compose.yml` and `Dockerfile` are right as far as that shows without an engine: Debian's docker-compose and
the Compose specification's schema accept the file, it holds no secret, and the store is probed by the command that it
names. Building the image takes minutes and a registry: docs/operations.md says what was tried."""

import fnmatch
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.debian import newest
from tests.s3 import S3Server

ROOT = Path(__file__).parents[1]
SECRETS = {
    "POSTGRES_PASSWORD": "for-postgres",
    "AWS_ACCESS_KEY_ID": "for-s3",
    "AWS_SECRET_ACCESS_KEY": "secret-of-s3",
    "RAY_AUTH_TOKEN": "for-ray",
}


@pytest.fixture(scope="module")
def docker_compose() -> Path:
    try:
        root = newest("docker-compose", ROOT / "build" / "docker-compose")
    except RuntimeError as error:
        pytest.skip(str(error))
    return next(path for path in root.rglob("docker-compose") if path.is_file() and os.access(path, os.X_OK))


def config(docker_compose: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [docker_compose, "--env-file", "/dev/null", "--file", ROOT / "docker-compose.yml", "config"]
    variables = {name: value for name, value in os.environ.items() if name not in SECRETS} | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"])


@pytest.mark.slow
def test_docker_compose_accepts_the_file_and_hands_the_secrets_to_those_who_need_them(docker_compose) -> None:
    done = config(docker_compose, **SECRETS)
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    holders = {
        secret: {name for name, service in found["services"].items() if value in str(service)}
        for secret, value in SECRETS.items()
    }
    drivers = {"ray-head", "ray-worker", "store", "worker"}
    assert holders["POSTGRES_PASSWORD"] == {"postgres", "prefect"}
    assert holders["AWS_SECRET_ACCESS_KEY"] == drivers
    assert holders["RAY_AUTH_TOKEN"] == {*drivers, "redis"}
    assert "secret-of-s3" in found["configs"]["s3"]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("missing", sorted(SECRETS))
def test_nothing_starts_without_its_secret(docker_compose, missing: str) -> None:
    done = config(docker_compose, **{name: value for name, value in SECRETS.items() if name != missing})
    assert done.returncode != 0
    assert f"{missing} is missing a value: is to be set in .env" in done.stderr


@pytest.mark.slow
def test_the_specifications_schema_accepts_the_file() -> None:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        "docker-compose.yml",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_of_others_is_pinned_and_every_service_that_stays_says_how_it_is(services) -> None:
    for name, service in services.items():
        image = service.get("image", "")
        if image and not image.startswith("cairn:"):
            assert re.fullmatch(r"[^:]+:\d+(\.\d+)+(-\w+)?", image), f"{name}: {image}"
        if service.get("restart") != "no":
            assert "healthcheck" in service, name


@pytest.mark.slow
def test_the_store_is_made_and_probed_by_the_command_in_the_file(services, s3_server: S3Server) -> None:
    line = services["store"]["command"]
    assert services["worker"]["depends_on"]["store"] == {"condition": "service_completed_successfully"}
    folder = Path(sys.executable).parent
    environment = {**os.environ, **s3_server.env, "CAIRN_STORE": "s3://cairn", "PATH": f"{folder}:{os.environ['PATH']}"}
    for _ in range(2):  # containers start again
        done = subprocess.run(shlex.split(line), env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "s3://cairn can store runs"
    environment["AWS_SECRET_ACCESS_KEY"] = ""
    assert subprocess.run(shlex.split(line), env=environment, capture_output=True, timeout=120).returncode != 0


def test_the_image_is_built_from_files_that_are_there_and_sent_to_it() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in sent), sent
    copies = re.findall(r"^COPY (?:--chown=\w+ )?((?!--from)\S+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert copies
    for source in copies:
        assert source == "." or any(fnmatch.fnmatch(source.split("/")[0], name) for name in sent), source
    packages = {line.split(".")[1] for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"cairn.' in line}
    rooms = {name.split('"')[0] for name in packages}
    rooms = {name for name in rooms if not (ROOT / "cairn" / name).is_dir()}
    assert rooms <= set(sent), rooms - set(sent)
