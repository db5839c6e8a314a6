"""Weights of several files on a GPU: the values of the files, through page-locked buffers of bounded size."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
import torch

from rose_backend.models import streaming
from rose_backend.models.streaming import Copy, stream
from rose_backend.models.weights import find_tensors
from tests.models.test_weight_streaming import write

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("buffer_bytes", [1 << 16, streaming.BUFFER_BYTES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_several_hundred_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, buffer_bytes: int
) -> None:
    sizes: list[int] = []
    original = streaming._host_buffer

    def counted(num_bytes: int, *, pinned: bool) -> torch.Tensor:
        assert pinned, "a copy from pageable memory waits for the device"
        sizes.append(num_bytes)
        return original(num_bytes, pinned=pinned)

    monkeypatch.setattr(streaming, "_host_buffer", counted)
    tensors = {str(index): torch.randn(4099, 4096).bfloat16() for index in range(10)}
    tensors |= {f"norm {index}": torch.randn(4097).bfloat16() for index in range(10)}
    found = find_tensors(write(tmp_path, tensors, num_files=3))
    whole = torch.full((4099 * 10 + 2, 4096), 7.0, dtype=dtype, device="cuda")
    matrices = whole[1:-1].split(4099)
    # Work that is still under way on the memory that the copies write.
    whole.copy_((whole.float() @ torch.eye(4096, device="cuda")).to(dtype))
    places = {str(index): matrices[index] for index in range(10)}
    places |= {f"norm {index}": torch.empty(4097, dtype=dtype, device="cuda") for index in range(10)}
    monkeypatch.setattr(streaming, "BUFFER_BYTES", buffer_bytes)
    stream([Copy(found[name], place) for name, place in places.items()])
    for name, place in places.items():
        assert torch.equal(place.cpu(), tensors[name].to(dtype)), name
    assert bool((whole[0] == 7).all()) and bool((whole[-1] == 7).all())
    assert max(sizes) <= buffer_bytes
    assert len(sizes) <= streaming.MAX_READERS * streaming.BUFFERS_PER_READER


def test_a_whole_model_is_the_one_of_the_cpu(tmp_path: Path) -> None:
    from rose_backend.config import Switches
    from rose_backend.models.base import load_model
    from tests.support.llama_checkpoints import write_checkpoint

    checkpoint = write_checkpoint(tmp_path / "model", "llama")
    switches = Switches(fused_mlp=False)  # or layers are packed, whose matrices have another layout
    models = [
        load_model(checkpoint, dtype="float16", device=device, switches=switches)
        for device in ("cpu", "cuda")
    ]
    left, right = (model.weights for model in models)
    assert torch.equal(left.padded_lm_head, right.padded_lm_head.cpu())
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        for name in ("qkv.weight", "attn_out.weight", "mlp.widen.weight", "mlp.narrow.weight"):
            assert torch.equal(attrgetter(name)(ours), attrgetter(name)(theirs).cpu()), name
