"""Only models whose Python keeps nothing between steps get full graphs of steps with prompts.

``state_of_forward.txt`` lists what ``tests.support.forward_state`` finds in vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

import rose_backend
from rose_backend.vllm_plugin.attention.audited_models import AUDITED_CLASSES, class_of, find_unaudited
from tests.support.forward_state import ModelClass, find_state, read_classes

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LISTED = dict(
    line.split(" ", 1) for line in Path(__file__).with_name("state_of_forward.txt").read_text().splitlines()
)
HARMLESS = {
    "vllm.model_executor.layers.fused_moe.runner.shared_experts:SharedExperts": "taken again by the same step",
    "vllm.model_executor.models.gemma4:Gemma4Model": "by fast prefill alone, which is refused",
    "vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VisionTransformer": "an encoder, outside of the graphs",
}
"""What audited models reach of the listed classes, and why a replay may leave it out."""


@pytest.fixture(scope="module")
def classes() -> dict[str, ModelClass]:
    rose = read_classes(Path(rose_backend.__file__).parent, "rose_backend", ("vllm_plugin/models", "layers"))
    return read_classes(Path(vllm.__file__).parent, "vllm") | rose


@pytest.fixture(scope="module")
def state(classes: dict[str, ModelClass]) -> dict[str, set[str]]:
    return find_state(classes)


def test_every_class_that_keeps_something_is_listed(state: dict[str, set[str]]) -> None:
    # A new one: read it, look at what is built of it, and add the line.
    new = {
        name: changed for name, changed in state.items() if not changed <= set(LISTED.get(name, "").split())
    }
    assert not new


@pytest.mark.parametrize("name", AUDITED_CLASSES)
def test_what_an_audited_model_is_made_of_keeps_nothing(
    name: str, classes: dict[str, ModelClass], state: dict[str, set[str]]
) -> None:
    reached = {each.name for each in classes[name].reached()}
    assert len(reached) > 1 and not (reached & state.keys()) - HARMLESS.keys()


def test_the_scan_finds_what_forward_clears_sets_and_inherits(state: dict[str, set[str]]) -> None:
    models = "vllm.model_executor.models."
    features = {"deepstack_input_embeds", "deepstack_input_embeds_num_tokens"}
    for name in ("qwen3_vl:Qwen3VL", "qwen3_vl_moe:Qwen3VLMoe"):
        assert state[f"{models}{name}ForConditionalGeneration"] == features
    assert state[f"{models}ernie45_vl:Ernie4_5_VLMoeForConditionalGeneration"] == {"visual_token_mask"}
    # Written in front of forward, under another name than the attribute's.
    assert "_ds_buffers" in state[f"{models}granite4_vision:Granite4VisionForConditionalGeneration"]


def model(architecture: str, **text: Any) -> Any:
    text_config = SimpleNamespace(**{"architectures": None, "model_type": "", **text})
    return SimpleNamespace(architecture=architecture, hf_text_config=text_config)


@pytest.mark.parametrize(
    ("config", "unaudited"),
    [
        (model("Qwen3ForCausalLM"), None),
        (model("TeleChat3ForCausalLM"), None),
        (model("Qwen2_5_VLForConditionalGeneration"), None),
        (model("Mistral3ForConditionalGeneration", model_type="mistral"), None),
        (model("Mistral3ForConditionalGeneration", architectures=["Ministral3ForCausalLM"]), None),
        (model("Mistral3ForConditionalGeneration", model_type="falcon_h1"), "FalconH1ForCausalLM"),
        (model("Mistral3ForConditionalGeneration", model_type="nobody"), "nobody"),
        (model("Qwen3VLForConditionalGeneration"), "Qwen3VLForConditionalGeneration"),
        (model("SmolVLMForConditionalGeneration"), "SmolVLMForConditionalGeneration"),
        (model("TransformersForCausalLM"), "TransformersForCausalLM"),
        (model("NobodysForCausalLM"), "NobodysForCausalLM"),
    ],
    ids=str,
)
def test_the_class_that_runs_counts(config: Any, unaudited: str | None) -> None:
    assert find_unaudited(config) == unaudited


class OwnQwen3(Qwen3ForCausalLM):  # type: ignore[misc]
    pass


@pytest.mark.parametrize("by_name", [False, True])
def test_a_class_of_the_users_own_is_not_audited(monkeypatch: pytest.MonkeyPatch, by_name: bool) -> None:
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    for name, kind in (("Qwen3ForCausalLM", OwnQwen3), ("Qwen2ForCausalLM", OwnQwen3)):
        ModelRegistry.register_model(name, f"{__name__}:{kind.__name__}" if by_name else kind)
    assert class_of("Qwen3ForCausalLM") == f"{__name__}:OwnQwen3"
    assert find_unaudited(model("Qwen3ForCausalLM")) == "Qwen3ForCausalLM"
    # It is this one's language model.
    assert find_unaudited(model("Qwen2_5_VLForConditionalGeneration")) == "Qwen2ForCausalLM"


def test_the_documentation_lists_them() -> None:
    section = PAGE.read_text().partition("### Full CUDA graphs of steps with prompts")[2].partition("\n##")[0]
    listed = re.findall(r"`(\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel))`", section)
    own = {name.partition(":")[2] for name in AUDITED_CLASSES if name.startswith("vllm.")}
    assert len(listed) == len(set(listed)) and set(listed) == own


@pytest.mark.usefixtures("make_config")
def test_vllms_registry_has_every_audited_class() -> None:
    registered = {
        f"{entry.module_name}:{entry.class_name}"
        for entry in ModelRegistry.models.values()
        if isinstance(entry, _LazyRegisteredModel)
    }
    assert AUDITED_CLASSES.keys() <= registered
