"""Optimisers, learning rates and weight averages."""

import copy
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.configs.recipe import Recipe
from vitrail.errors import UsageError


def make_optimisers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """One optimiser, or Muon for the blocks' matrices and AdamW for the rest.

    Each group of parameters carries `share`: what its learning rate is of the schedule's.
    """
    shares = _layer_shares(model, recipe.layer_decay)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    to_muon = {name for name in trained if recipe.optimiser == "muon" and _is_hidden_matrix(name, trained[name])}
    groups: dict[tuple[bool, bool, float, int], list[Tensor]] = {}
    for name, parameter in trained.items():
        # Queries, keys and values stand on top of each other in one matrix.
        parts = 3 if name.endswith(".qkv.weight") else 1
        key = (name in to_muon, is_decayed(name, parameter), shares[name], parts)
        groups.setdefault(key, []).append(parameter)
    made: list[torch.optim.Optimizer] = []
    for is_muon in (True, False):
        settings: list[dict[str, Any]] = [
            {
                "params": parameters, "share": share, "lr": recipe.learning_rate * share,
                "weight_decay": recipe.weight_decay if decayed else 0.0, "parts": parts,
            }
            for (muon, decayed, share, parts), parameters in groups.items()
            if muon == is_muon
        ]  # fmt: skip
        if not settings:
            continue
        if is_muon:
            made.append(Muon(settings, momentum=recipe.momentum))
        elif recipe.optimiser == "sgd":
            made.append(torch.optim.SGD(settings, momentum=recipe.momentum, fused=True))
        else:
            made.append(torch.optim.AdamW(settings, betas=recipe.betas, fused=True))
    return made


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices and kernels; not for biases, norms, scales, tokens and positions."""
    leaf = name.rpartition(".")[2]
    return parameter.ndim >= 2 and leaf.startswith("weight")


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "blocks." in name and is_decayed(name, parameter)


_TOP = ("head.", "norm.", "pre_logits.", "attn_pool.", "decoder.")


def is_row_of_blocks(names: Iterable[str]) -> bool:
    """Whether these parameters are of a model whose layers have an order, block after block."""
    names = list(names)
    return any("blocks.0." in name for name in names) and not any("stages." in name for name in names)


def _layer_shares(model: nn.Module, decay: float) -> dict[str, float]:
    """Each parameter's share of the learning rate: 1 for the head, `decay` less for each block below it."""
    names = [name for name, _ in model.named_parameters()]
    if decay == 1:
        return dict.fromkeys(names, 1.0)
    # An objective calls what it trains `model.`.
    layers = {name: re.match(r"blocks\.(\d+)\.", name.removeprefix("model.")) for name in names}
    depth = max((int(found[1]) + 1 for found in layers.values() if found), default=0)
    if not is_row_of_blocks(names):
        raise UsageError("Layer decay must be 1 for models without a row of blocks.")
    shares = {}
    for name, found in layers.items():
        is_top = not found and name.removeprefix("model.").startswith(_TOP)
        layer = int(found[1]) + 1 if found else depth + 1 if is_top else 0
        shares[name] = decay ** (depth + 1 - layer)
    return shares


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal (K. Jordan 2024), with steps as long as AdamW's usually are (arXiv 2502.16982).

    Torch's own Muon works in bfloat16, which CPUs without it emulate 40 times slower; this one stays in the weights'
    precision. Queries, keys and values share one matrix but are made orthogonal one by one.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum, "parts": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # ty: ignore[incompatible-method-override]
        """One update."""
        if closure is not None:
            raise UsageError("Muon must be given no closure.")
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            # Equal shapes go through the iteration together: many small products cost more than one batch of them.
            stacks: dict[tuple[int, int], list[Tensor]] = {}
            for parameter in trained:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                moving = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(moving, group["momentum"])
                for part in direction.chunk(group["parts"]):
                    stacks.setdefault((part.shape[0], part.shape[1]), []).append(part)
            updates = {shape: iter(orthogonal(torch.stack(parts))) for shape, parts in stacks.items()}
            for parameter in trained:
                rows, columns = parameter.shape[0] // group["parts"], parameter.shape[1]
                update = torch.cat([next(updates[rows, columns]) for _ in range(group["parts"])])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
        return


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """About the nearest orthogonal matrices, by a quintic Newton-Schulz iteration: singular values come near to 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def schedule(recipe: Recipe, step: int, total: int) -> float:
    """The learning rate of a step as a share of the highest."""
    warmup = round(recipe.warmup * total) if recipe.warmup < 1 else int(recipe.warmup)
    if step < warmup:
        return (step + 1) / warmup
    rest = max(total - warmup, 1)
    progress = min((step - warmup) / rest, 1.0)
    match recipe.schedule:
        case "constant":
            return 1.0
        case "linear":
            height = 1 - progress
        case "cosine":
            height = 0.5 + 0.5 * math.cos(math.pi * progress)
        case "rsqrt":
            # 1 / sqrt of the step (arXiv 2106.04560), with a line to the end in place of the last part.
            falling = math.sqrt(max(warmup, 1) / max(step, warmup, 1))
            height = falling * min((total - step) / max(recipe.cooldown * total, 1), 1.0)
    return recipe.final + (1 - recipe.final) * height


def set_learning_rate(optimisers: list[torch.optim.Optimizer], rate: float) -> None:
    """Give every group its share."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate * group["share"]


class Average:
    """A running average of a model's weights. It starts with short memory: decay min(d, (1 + t) / (10 + t))."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        weights = dict(self.model.named_parameters())
        self._statistics = [name for name in self.model.state_dict() if name not in weights]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move towards the model's weights after `step` updates; running statistics are copied."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)
        for name in self._statistics:
            self.model.get_buffer(name).copy_(model.get_buffer(name))
