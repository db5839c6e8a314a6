"""Whether Rose's side of a case says what stock vLLM's says: the rule, and what it was decided by.

``R`` is the rounding observed: the largest difference between a log-probability that *stock* reported, of a prompt's
token or of a generated one, and float32's behind the same tokens. All limits are twice that, since a comparison has two
sides. A case is equal if

- two texts of one request are the same, or part at a near tie: behind the same tokens, float32's log-probabilities of
  the two tokens that differ first are at most 2 R apart; Rose's against stock's, and those asked again against the
  first ones. Up to there the likeliest tokens that both reported have log-probabilities at most 2 R apart;
- no greedy token of either side, also behind such a place, is more than 2 R behind the one that float32 prefers;
- no log-probability that Rose reported is more than 2 R away from float32's, and their mean error is at most
  ``MEAN_SLACK`` times stock's; no drawn token is more than 2 R below the ``top_k``-th likeliest;
- requests repeated with nothing in the cache are equal to the first ones bit by bit, if stock's are;
- the traffic was what it should be (``MINIMUM``), and a quarter of all greedy tokens lead by more than 2 R: else it
  could not tell a wrong token from a right one. (A token that wrong K/V brings is some ten times further behind.)

Embeddings of pooling models: the same limits for each component of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from statistics import fmean, quantiles
from typing import Any

MEAN_SLACK = 1.25
ROUNDS = ("again-", "third-", "fourth-", "afresh-")
LOADED = ("offloading",)
"""Where an emptied cache is filled from elsewhere: what is computed depends on how much that brings."""
MINIMUM = {"mixed_steps": 5, "chunked_steps": 5, "cached_tokens": 100, "preemptions": 1}
"""Of Rose's side, at least."""
FEATURE_MINIMUM: dict[str, dict[str, int]] = {
    # Drafts that were kept, and by ``_complaints_about_traffic`` ones that were not.
    "n-gram drafts": {"accepted": 20},
    "draft model": {"accepted": 20},
    "EAGLE head": {"accepted": 20},
    "MTP head": {"accepted": 20},
    "offloading": {"loaded_tokens": 100},
    "pooling": {"mixed_steps": 0, "preemptions": 0},
}
Report = dict[str, Any]


@dataclass
class Verdict:
    """The outcome of one case."""

    outcome: str = "equal"
    """"equal", "different", "too little traffic" (no difference found, but ``MINIMUM`` not reached) or "not run"."""
    complaints: list[str] = field(default_factory=list)
    """What is different or missing, or why it was not run."""
    rounding: float = 0.0
    mean_error: dict[str, float] = field(default_factory=dict)
    worst_error: dict[str, float] = field(default_factory=dict)
    upper_quartile_lead: float = 0.0
    """By which a quarter of stock's greedy tokens lead, at least."""
    num_requests: int = 0
    num_parted: int = 0
    """Texts that part from stock's at a near tie."""
    is_exact: dict[str, bool] = field(default_factory=dict)
    """Whether each side's requests, repeated with an empty cache, gave the same bits."""
    counts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def judge(rose: Report, stock: Report) -> Verdict:
    """Compare the two sides of one case."""
    verdict = Verdict(
        versions=rose["versions"],
        date=rose["date"],
        seconds={side["side"]: side.get("seconds") for side in (rose, stock)},
        counts=rose.get("counts", {}),
    )
    if reasons := [side["not_run"] for side in (rose, stock) if "not_run" in side]:
        verdict.outcome, verdict.complaints = "not run", sorted(set(reasons))
        return verdict
    verdict.num_requests = len(rose["answers"])
    errors = {side["side"]: list(_errors(side)) for side in (rose, stock)}
    verdict.rounding = max(errors["stock"])
    verdict.mean_error = {side: fmean(found) for side, found in errors.items()}
    verdict.worst_error = {side: max(found) for side, found in errors.items()}
    limit = 2 * verdict.rounding
    complaints = verdict.complaints
    if rose["answers"].keys() != stock["answers"].keys():
        complaints.append("the two sides were not asked the same")
    if verdict.worst_error["rose"] > limit:
        complaints.append(
            f"a log-probability is wrong by {verdict.worst_error['rose']:.2e}, 2 R is {limit:.2e}"
        )
    if verdict.mean_error["rose"] > MEAN_SLACK * verdict.mean_error["stock"]:
        complaints.append(
            f"log-probabilities are wrong by {verdict.mean_error['rose']:.2e} on average,"
            f" stock's by {verdict.mean_error['stock']:.2e}"
        )
    if rose["case"] != "pooling":
        _judge_texts(verdict, rose, stock, limit)
    verdict.is_exact = {side["side"]: _is_repeated(side) for side in (rose, stock)}
    if verdict.is_exact["stock"] and not verdict.is_exact["rose"] and rose["case"] not in LOADED:
        complaints.append(
            "requests repeated with an empty cache are not the first ones bit by bit; stock's are"
        )
    missing = _complaints_about_traffic(rose)
    verdict.outcome = "different" if complaints else "too little traffic" if missing else "equal"
    complaints += missing
    return verdict


def _judge_texts(verdict: Verdict, rose: Report, stock: Report, limit: float) -> None:
    leads = [lead for _, completion in _greedy(stock) for lead in completion["exact_leads"]]
    verdict.upper_quartile_lead = quantiles(leads, n=4)[2]
    complaints = verdict.complaints
    if limit >= verdict.upper_quartile_lead:
        complaints.append(
            f"cannot tell: 2 R is {limit:.2e}, three quarters of all leads are below {verdict.upper_quartile_lead:.2e}"
        )
    for side in (rose, stock):
        for name, completion in _greedy(side):
            lead = min(completion["exact_leads"], default=0.0)
            if lead < -limit:
                complaints.append(
                    f"{side['side']}, {name}: a token is {-lead:.2e} behind another one, 2 R is {limit:.2e}"
                )
    for name, answer in rose["answers"].items():
        if not answer["ask"]["is_greedy"]:
            complaints += _complaints_about_draws(name, answer, stock["answers"][name], limit)
            continue
        parted = _complaints_about_pair(name, answer, stock["answers"][name], limit)
        verdict.num_parted += parted is not None
        complaints += parted or []
        for prefix in ROUNDS:
            if name.startswith(prefix):
                of_first = _complaints_about_pair(
                    name, answer, rose["answers"][name.removeprefix(prefix)], limit
                )
                complaints += [f"{line} (the first time)" for line in of_first or []]


def _complaints_about_pair(name: str, ours: Report, theirs: Report, limit: float) -> list[str] | None:
    """Return None where two greedy answers are the same, else why they may not part where they do."""
    (one,), (other,) = ours["completions"], theirs["completions"]
    pairs = list(zip(one["tokens"], other["tokens"], strict=False))
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    for step, (a, b) in enumerate(zip(one["top"][: _upto(place)], other["top"], strict=False)):
        if len(a) != len(b) or max(_differences(a, b)) > limit:
            return [f"{name}: likeliest tokens {step} have {a}, not {b}"]
    if one["tokens"] == other["tokens"]:
        return None if one["text"] == other["text"] else [f"{name}: of the same tokens, other text"]
    if place is None:
        return [f"{name}: {len(one['tokens'])} tokens, not {len(other['tokens'])}"]
    gap = abs(one["exact_logprobs"][place] - other["exact_logprobs"][place])
    if gap <= limit:
        return []
    return [
        f"{name}: token {place} is {one['tokens'][place]}, not {other['tokens'][place]};"
        f" float32 puts {gap:.2e} between them, 2 R is {limit:.2e}"
    ]


def _upto(place: int | None) -> int | None:
    return None if place is None else place + 1


def _complaints_about_draws(name: str, ours: Report, theirs: Report, limit: float) -> list[str]:
    lengths = [[len(each["tokens"]) for each in side["completions"]] for side in (ours, theirs)]
    if lengths[0] != lengths[1]:
        return [f"{name}: completions of {lengths[0]} tokens, not {lengths[1]}"]
    below = max(
        bound - logprob
        for completion in ours["completions"]
        for logprob, bound in zip(completion["exact_logprobs"], completion["exact_bounds"], strict=True)
    )
    return [f"{name}: a drawn token is {below:.2e} below those allowed"] if below > limit else []


def _complaints_about_traffic(rose: Report) -> list[str]:
    counts = rose["counts"]
    minimum = MINIMUM | FEATURE_MINIMUM.get(rose["case"], {})
    lines = [
        f"{name}: {counts[name]}, at least {least} are needed"
        for name, least in minimum.items()
        if counts[name] < least
    ]
    if "accepted" in minimum and counts["accepted"] >= counts["drafted"]:
        lines.append("all drafts were accepted")
    return lines


def _greedy(side: Report) -> Iterator[tuple[str, Report]]:
    """Yield the completions in which each token is the likeliest of all."""
    for name, answer in side["answers"].items():
        if answer["ask"]["is_greedy"] and answer["ask"]["kind"] != "structured":
            yield name, answer["completions"][0]


def _errors(side: Report) -> Iterator[float]:
    """Yield by how much each reported number differs from float32's."""
    for answer in side["answers"].values():
        if "embedding" in answer:
            yield from _differences(answer["embedding"], answer["exact"])
            continue
        if answer["prompt_logprobs"]:
            yield from _differences(answer["prompt_logprobs"], answer["exact_prompt_logprobs"])
        for completion in answer["completions"]:
            if completion["logprobs"]:
                yield from _differences(completion["logprobs"], completion["exact_logprobs"])


def _differences(ours: list[float], theirs: list[float]) -> Iterator[float]:
    for one, other in zip(ours, theirs, strict=True):
        # What is not a number is further away than any limit.
        yield abs(one - other) if isfinite(one) else inf


def _is_repeated(side: Report) -> bool:
    answers = side["answers"]
    numbers = ("completions", "embedding")
    return all(
        _numbers(answer, numbers) == _numbers(answers[name.removeprefix("afresh-")], numbers)
        for name, answer in answers.items()
        if name.startswith("afresh-")
    )


def _numbers(answer: Report, names: tuple[str, ...]) -> list[Any]:
    return [answer.get(name) for name in names]
