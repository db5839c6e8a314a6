"""The Dockerfile, and the values for vLLM's production stack: what can be tested without an image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import rose_backend
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "examples" / "production_stack_values.yaml"

# The keys of helm/values.schema.json, version 0.1.12 of the chart vllm-stack (a6c01db), where the file has a mapping.
# securityContext and containerSecurityContext are Kubernetes' own.
CHART_KEYS = {
    "": "cacheserverSpec extraObjects grafanaDashboards kube-prometheus-stack loraAdapters loraController "
    "prometheus-adapter routerSpec servingEngineSpec sharedPvcStorage",
    "servingEngineSpec": "configs containerPort containerSecurityContext enableEngine extraPorts imagePullPolicy "
    "labels livenessProbe modelSpec readinessProbe runtimeClassName schedulerName securityContext serviceMonitor "
    "servicePort sidecar startupProbe strategy tolerations vllmApiKey",
    "servingEngineSpec.securityContext": "runAsNonRoot runAsUser runAsGroup fsGroup seccompProfile",
    "servingEngineSpec.containerSecurityContext": "runAsNonRoot allowPrivilegeEscalation capabilities",
    "servingEngineSpec.modelSpec": "affinity annotations enableLoRA enabled env envFromSecret extraVolumeMounts "
    "extraVolumes hf_token imagePullSecret initContainer keda labels limitCPU limitGPUCores limitGPUMem "
    "limitGPUMemPercentage limitMemory lmcacheConfig modelRevision modelURL name nodeName nodeSelectorTerms "
    "podAnnotations podLabels priorityClassName pvcAccessMode pvcAnnotations pvcLabels pvcMatchLabels pvcStorage "
    "raySpec replicaCount repository requestCPU requestGPU requestGPUCores requestGPUMem requestGPUMemPercentage "
    "requestGPUType requestMemory resources runtimeClassName serviceAccountName serviceAnnotations shmSize "
    "storageClass tag tolerations tolerationsPolicy vllmConfig",
    "servingEngineSpec.modelSpec.vllmConfig": "convert dtype enableChunkedPrefill enablePrefixCaching extraArgs "
    "gpuMemoryUtilization maxLoras maxModelLen maxNumSeqs runner tensorParallelSize v0",
}
# Without these the chart's template renders nothing that runs.
REQUIRED = {
    "name",
    "repository",
    "tag",
    "modelURL",
    "replicaCount",
    "requestCPU",
    "requestMemory",
    "requestGPU",
}


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions in order, with what follows each: lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def run_command(part: str) -> str:
    """Return the one RUN that contains a text, without its options, for a shell."""
    (found,) = [text for name, text in instructions() if name == "RUN" and part in text]
    return re.sub(r"^(--\S+\s+)+", "", found)


def test_the_base_image_is_vllms_of_the_pinned_release() -> None:
    pin = re.search(r"^vllm==(.+)$", (ROOT / "requirements" / "cuda.txt").read_text(), re.MULTILINE)
    assert pin is not None
    assert instructions()[:2] == [
        ("ARG", f"VLLM_VERSION={pin[1]}"),
        ("FROM", "vllm/vllm-openai:v${VLLM_VERSION}"),
    ]


def test_the_image_keeps_the_entry_point_and_is_not_roots() -> None:
    names = [name for name, _ in instructions()]
    assert not {"ENTRYPOINT", "CMD"} & set(names)
    (user,) = [text for name, text in instructions() if name == "USER"]
    # A number: with a name, Kubernetes cannot tell that it is not root.
    assert re.fullmatch(r"[1-9]\d*:0", user)
    assert f"-o {user.partition(':')[0]} -g 0 -m 2775" in run_command("TRITON_CACHE_DIR")
    context = VALUES.read_text()
    assert f"runAsUser: {user.partition(':')[0]}\n" in context


def test_the_wheel_is_all_that_is_sent_to_the_builder() -> None:
    copies = [text.split()[:-1] for name, text in instructions() if name in ("COPY", "ADD")]
    assert copies == [["dist/rose_backend-*.whl"]]
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules == ["*", "!dist/rose_backend-*.whl"]


@pytest.mark.parametrize("version", ["0.32.0", "0.99.0"])
def test_another_vllm_ends_the_build_by_name(tmp_path: Path, version: str) -> None:
    metadata = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    write_program(programs / "rose", 'echo "rose $*"')
    (programs / "python3").symlink_to(sys.executable)
    finished = run_shell(run_command("is_supported"), programs, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    if version == "0.99.0":
        assert finished.returncode == 1 and finished.stdout == ""
        assert finished.stderr.startswith("VLLM_VERSION: got 0.99.0, Rose supports >=")
    else:
        assert (finished.returncode, finished.stdout) == (0, "rose env\n"), finished.stderr


@pytest.mark.parametrize(
    ("models", "status", "warmed"),
    [("", 0, []), ("a/b c", 0, ["a/b", "c"]), ("a/b broken c", 1, ["a/b", "broken"])],
)
def test_the_models_that_are_named_are_warmed_up(
    tmp_path: Path, models: str, status: int, warmed: list[str]
) -> None:
    write_program(tmp_path / "rose", 'echo "$* token=$HF_TOKEN"; test "$2" != broken')
    command = run_command("rose warmup")
    finished = run_shell(command, tmp_path, WARMUP_MODELS=models, COMPUTE_CAPABILITY="8.0")
    expected = "".join(f"warmup {model} --compute-capability 8.0 token=\n" for model in warmed)
    assert (finished.returncode, finished.stdout) == (status, expected), finished.stderr


def write_program(path: Path, text: str) -> None:
    """Write a shell script that can be run."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run_shell(command: str, programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the Dockerfile in a shell that finds stand-ins first."""
    environment = {**os.environ, **variables, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, timeout=HANG_S
    )


def test_the_production_stacks_chart_knows_every_key() -> None:
    values = yaml.safe_load(VALUES.read_text())
    unknown = []

    def walk(part: Any, path: str) -> None:
        if isinstance(part, dict):
            known = CHART_KEYS[path].split()
            unknown.extend(f"{path}.{key}" for key in part if key not in known)
            for key, value in part.items():
                walk(value, f"{path}.{key}".lstrip("."))
        elif isinstance(part, list) and part and isinstance(part[0], dict):
            for each in part:
                walk(each, path)

    walk(values, "")
    assert unknown == []
    for model in values["servingEngineSpec"]["modelSpec"]:
        assert model.keys() >= REQUIRED
        assert model["tag"] == rose_backend.__version__
        assert model["vllmConfig"]["extraArgs"] == ["--attention-backend", "rose"]
        assert model["vllmConfig"]["enablePrefixCaching"] is True
