"""The training loop: AdamW, warm-up and cosine, bfloat16 autocast on CUDA, best validation weights kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

# About 1 / sqrt(2 * width): GPT-2's 0.02 suits a width of 768 and makes a narrow model start slowly.
INITIALIZER_RANGE = 0.06


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Everything that decides the result. ``dropout`` is for embeddings and residuals, not for attention."""

    steps: int
    batch_size: int
    learning_rate: float
    adam_beta2: float = 0.99
    final_learning_rate: float = 2e-5
    warmup_steps: int = 400
    weight_decay: float = 0.1
    dropout: float = 0.0
    evaluations: int = 40
    seed: int = 20250
    window: int = 1024
    """Tokens of a sequence in training and validation."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses in nats per token; ``train`` is the mean since the previous evaluation."""

    step: int
    train: float
    validation: float


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The model holds the float32 weights of the evaluation with the lowest validation loss."""

    model: PreTrainedModel
    best: Evaluation
    evaluations: list[Evaluation]


def build_model(vocab_size: int, end_of_text: int, dropout: float) -> GPT2LMHeadModel:
    """Return a freshly initialised GPT-2: width 128, 5 layers, 2 heads of 64, 1,024 positions, tied head."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=1024,
        n_embd=128,
        n_layer=5,
        n_head=2,
        initializer_range=INITIALIZER_RANGE,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    return GPT2LMHeadModel(config)


def learning_rate_at(step: int, settings: TrainingSettings) -> float:
    """Linear warm-up, then a cosine down to ``final_learning_rate`` at the last step."""
    warmup = min(settings.warmup_steps, max(1, settings.steps // 10))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    span = settings.learning_rate - settings.final_learning_rate
    return settings.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(
    model: PreTrainedModel, settings: TrainingSettings, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, settings.adam_beta2), fused=fused)


def windows(stream: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut ``length`` inputs and their next tokens from ``stream`` at every start: two [B, length] int64."""
    index = starts[:, None] + torch.arange(length + 1, device=stream.device)
    tokens = stream[index]
    return tokens[:, :-1], tokens[:, 1:]


def next_token_loss(model: PreTrainedModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, computed in float32; autocast to bfloat16 on CUDA."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.device.type == "cuda"):
        logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: PreTrainedModel, stream: Tensor, batch_size: int, window: int) -> float:
    """Mean loss over the whole validation stream in disjoint windows of so many tokens."""
    length = min(window, stream.numel() - 1)
    starts = torch.arange(0, stream.numel() - length, length, device=stream.device)
    model.eval()
    losses = [
        next_token_loss(model, *windows(stream, part, length)).item() * part.numel()
        for part in starts.split(batch_size)
    ]
    model.train()
    return sum(losses) / starts.numel()


def train(
    model: PreTrainedModel,
    train_ids: list[int],
    validation_ids: list[int],
    settings: TrainingSettings,
    device: torch.device,
    console: Console,
) -> TrainingResult:
    """Train on random windows and return the best weights by validation loss."""
    model = model.to(device).train()
    train_stream = torch.tensor(train_ids, device=device)
    validation_stream = torch.tensor(validation_ids, device=device)
    optimizer = make_optimizer(model, settings, device)
    step_loss = torch.compile(next_token_loss) if device.type == "cuda" else next_token_loss
    generator = torch.Generator().manual_seed(settings.seed)
    length = settings.window
    every = max(1, settings.steps // settings.evaluations)
    loss_sum, loss_count = torch.zeros((), device=device), 0
    evaluations: list[Evaluation] = []
    best_weights: dict[str, Tensor] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=settings.steps)
        for step in range(settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, settings)
            starts = torch.randint(len(train_ids) - length, (settings.batch_size,), generator=generator)
            loss = step_loss(model, *windows(train_stream, starts.to(device), length))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss_sum, loss_count = loss_sum + loss.detach(), loss_count + 1
            progress.advance(task)
            if (step + 1) % every == 0 or step + 1 == settings.steps:
                held_out = validation_loss(model, validation_stream, settings.batch_size, length)
                evaluation = Evaluation(step + 1, loss_sum.item() / loss_count, held_out)
                loss_sum, loss_count = torch.zeros((), device=device), 0
                console.print(f"step {step + 1}: train {evaluation.train:.4f}, validation {held_out:.4f}")
                if not evaluations or held_out < min(e.validation for e in evaluations):
                    best_weights = {name: value.clone() for name, value in model.state_dict().items()}
                evaluations.append(evaluation)
    model.load_state_dict(best_weights)
    best = min(evaluations, key=lambda e: e.validation)
    return TrainingResult(model=model, best=best, evaluations=evaluations)
