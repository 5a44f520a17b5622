"""torchrun_examples: messages quoted in its pages are in the code, and its recipes are valid.

Kubernetes and Slurm are absent: the commands that they would run are replaced by stubs, which
report their arguments.
"""

import ast
import configparser
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from helpers import dockerfile
from helpers.dockerfile import instructions
from helpers.flags import read
from helpers.launch import REPO
from llama.cli import COMMANDS
from llama.cli.ranks import USAGE

FOLDER = REPO / "torchrun_examples"
PAGE = REPO / "docs" / "reference" / "errors.md"
SET = FOLDER / "kubernetes_leader_worker_set.yaml"


@functools.cache
def all_strings() -> str:
    """Return every string in the package's code, f-strings in their parts, one per line."""
    trees = [ast.parse(path.read_text()) for path in (REPO / "llama").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return "\n".join(n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is str)


ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith(("| `", "| PROBLEM"))]


@pytest.mark.parametrize("row", ROWS, ids=[row.split("`")[1][:40] for row in ROWS])
def test_each_message_is_one_of_this_runtime(row):
    if row.startswith("| `llama doctor`"):
        return
    message = row.split("`")[1]
    # Cases where the code joins two strings, or puts the name of an exception before its text.
    split = re.split(r"\.\.\.| (?=differ between)|FileNotFoundError:", message)
    pieces = [piece.strip(" ():,") for piece in split]
    assert max(map(len, pieces)) > 8, "too little to search for"
    for piece in pieces:
        assert piece in all_strings(), f"nothing says {piece!r}"


def test_the_page_has_the_messages_of_torch_apart():
    torch_rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| *torch:*")]
    assert len(ROWS) > 10 and len(torch_rows) > 5
    for row in torch_rows:
        assert "`" in row and row.count("|") == 4


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)


def ran(folder: Path, words: list[str], **variables: str) -> list[str]:
    """Return the arguments of torchrun, which a stub of it writes to a file."""
    stub(folder, "torchrun", f'printf "%s\\n" "$@" > {folder}/words; exit ${{CODE:-0}}')
    stub(folder, "sleep", f"echo $1 > {folder}/slept")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        words, env={**os.environ, "PATH": path, **variables}, check=True, timeout=20, cwd=folder
    )
    return (folder / "words").read_text().splitlines()


def understood(words: list[str], **environ: str) -> tuple:
    """Return torchrun's options and those of the command `llama`, each read by its own parser."""
    launch = get_args_parser().parse_args(words)
    name, *rest = launch.training_script_args
    assert launch.module and launch.training_script == "llama"
    return launch, read(f"llama {name}", COMMANDS[name], rest, environ)


def test_slurm_starts_one_agent_per_machine(tmp_path):
    stub(tmp_path, "scontrol", '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    stub(tmp_path, "srun", '[ "$1" = --kill-on-bad-exit=1 ] && shift && exec "$@"')
    words = ran(
        tmp_path, ["bash", str(FOLDER / "two_machines_slurm.sh"), "weights", "in", "out"],
        SLURM_JOB_NODELIST="n[1-2]", SLURM_NNODES="2", SLURM_JOB_ID="77",
    )  # fmt: skip
    launch, options = understood(words)
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_id) == ("2", "8", "77")
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", "n1:29500")
    assert (options.ckpt_dir, options.in_file, options.out_file) == ("weights", "in", "out")
    assert options.resume, "Slurm may start the job again"


def test_the_leader_worker_set_has_the_fields_of_its_api():
    """The LeaderWorkerSet has the fields of its API.

    Fields and values are as in api/leaderworkerset/v1 of kubernetes-sigs/lws.
    """
    found = yaml.safe_load(SET.read_text())
    assert (found["apiVersion"], found["kind"]) == (
        "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet",
    )  # fmt: skip
    assert found.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert found["spec"].keys() <= {
        "replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig",
    }  # fmt: skip
    template = found["spec"]["leaderWorkerTemplate"]
    assert template.keys() <= {
        "leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy",
        "volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy",
    }  # fmt: skip
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart" and template["size"] == 2
    pod = template["workerTemplate"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    script = container["args"][0]
    injected = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}
    own = {variable["name"] for variable in container["env"]}
    assert set(re.findall(r"\$(\w+)", script)) <= injected | own


@pytest.mark.parametrize(("code", "ended"), [("0", True), ("1", False)])
def test_a_pod_sleeps_once_the_job_is_done(code, ended, tmp_path):
    """A pod sleeps once the job is done.

    Otherwise Kubernetes would start it again, which it must do only after a failure.
    """
    container = yaml.safe_load(SET.read_text())["spec"]["leaderWorkerTemplate"]["workerTemplate"][
        "spec"
    ]["containers"][0]
    variables = {
        "IN": str(tmp_path / "in"), "OUT": str(tmp_path / "out"), "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "llama-405b-0.llama-405b", "CODE": code,
    }  # fmt: skip
    command = [*container["command"], container["args"][0]]
    if not ended:
        with pytest.raises(subprocess.CalledProcessError):
            ran(tmp_path, command, **variables)
        return
    launch, options = understood(ran(tmp_path, command, **variables), LLAMA_CKPT_DIR="weights")
    assert (tmp_path / "slept").read_text() == "infinity\n"
    assert (launch.nnodes, launch.node_rank, launch.nproc_per_node) == ("2", 1, "8")
    assert (launch.master_addr, launch.master_port) == ("llama-405b-0.llama-405b", 29500)
    assert options.resume and options.ckpt_dir == "weights"


def test_groups_of_pods_serve_behind_haproxy(tmp_path):
    """The leaders of the groups listen, and HAProxy finds them by the name of their Service."""
    found = list(yaml.safe_load_all((FOLDER / "kubernetes_replicas.yaml").read_text()))
    groups, servers, proxy, service = found
    template = groups["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    assert leader["metadata"]["labels"] == servers["spec"]["selector"]
    assert worker["metadata"]["labels"] != servers["spec"]["selector"]
    (container,) = leader["spec"]["containers"]
    (other,) = worker["spec"]["containers"]
    assert (container["args"], container["env"]) == (other["args"], other["env"])
    assert container["readinessProbe"] and not other["readinessProbe"]
    variables = {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "llama-405b-0",
    }
    words = ran(tmp_path, [*container["command"], container["args"][0]], **variables)
    launch, options = understood(words, LLAMA_CKPT_DIR="weights", LLAMA_API_KEY="key")
    assert (launch.nnodes, launch.node_rank, launch.nproc_per_node) == ("2", 1, "8")
    (port,) = servers["spec"]["ports"]
    assert (options.host, options.port) == ("0.0.0.0", port["port"])
    assert servers["spec"]["clusterIP"] == "None"
    name = f" {servers['metadata']['name']}:{options.port} "
    assert name in (FOLDER / "haproxy_machines.cfg").read_text()
    assert proxy["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    for pod in (leader["spec"], worker["spec"], proxy["spec"]["template"]["spec"]):
        (each,) = pod["containers"]
        mounted = {mount["name"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


# --- the image and the service ---


def test_the_image_has_a_command_of_ours_and_listens_beyond_its_loopback():
    base = dict(instructions("base"))
    environ = dict(pair.split("=") for pair in base["ENV"].split())
    (program,) = json.loads(base["ENTRYPOINT"])
    name, *flags = json.loads(base["CMD"])
    options = read(f"{program} {name}", COMMANDS[name], flags, environ)
    assert (options.host, str(options.port)) == ("0.0.0.0", base["EXPOSE"])
    assert base["RUN"].endswith(f"--owner llama {environ['HF_HOME']}")
    for stage in ("cpu", "cuda"):
        assert instructions(stage)[-1] == ("USER", "llama"), "the server does not run as root"


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_of_the_image_tells_ready_from_not(status):
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    base = dict(instructions("base"))
    python, *arguments = json.loads(base["HEALTHCHECK"].partition(" CMD ")[2])
    assert python == "python" and f":{base['EXPOSE']}/" in arguments[-1]
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        arguments[-1] = arguments[-1].replace(base["EXPOSE"], str(server.server_port))
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60)
        thread.join()
    assert (done.returncode == 0) == (status == 200)


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed")
def test_a_linter_accepts_the_dockerfile():
    command = ["hadolint", "--failure-threshold", "warning", str(dockerfile.FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


UNIT = FOLDER / "llama.service"


def test_the_service_has_a_command_of_ours_and_time_to_drain():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    program, name, *flags = service["ExecStart"].split()
    options = read("llama", COMMANDS[name], flags, {})
    assert program.endswith("/bin/llama")
    assert float(service["TimeoutStopSec"].removesuffix("s")) > options.drain_s
    assert service["RestartPreventExitStatus"] == str(USAGE)
    variables = re.findall(r"^(?:Environment=|# +echo |# .*)(LLAMA_\w+)=", UNIT.read_text(), re.M)
    assert {"LLAMA_API_KEY_FILE", "LLAMA_CKPT_DIR"} <= set(variables)
    for variable in variables:
        assert variable.removeprefix("LLAMA_").lower() in COMMANDS["serve"].defaults


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_service(tmp_path):
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/llama/bin/llama", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
