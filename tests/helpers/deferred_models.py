"""Modules whose constructors do all kinds of things to their weights, and what they are when built for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from unittest import mock

import torch
from sdp_deepspeed.deferred_init import fills
from sdp_deepspeed.deferred_init.init import Init
from sdp_deepspeed.deferred_init.materialize import default_dtype
from sdp_deepspeed.deferred_init.operation import Ref, address
from sdp_deepspeed.deferred_init.program import Program
from torch import nn
from torch.nn import init

from sdp_deepspeed.plan.tensors import named_tensors

Tensors = dict[str, torch.Tensor]


@contextmanager
def small_fills() -> Iterator[None]:
    """Inside, fills are divided and passed over as if tensors of some dozen elements were large."""
    with mock.patch.object(fills, "MIN_JUMP", 16), mock.patch.object(fills, "MAX_STRETCH", 48):
        yield


class Holder(nn.Module):
    """A weight [30, 40], two vectors and a buffer, none of them initialized."""

    weight: nn.Parameter
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(30, 40))
        self.vector = nn.Parameter(torch.zeros(7))
        self.constant = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("table", torch.ones(3))


def _made(change: Callable[[Holder], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        holder = Holder()
        init.uniform_(holder.weight)  # replaced by most, so that only its draws count
        with torch.no_grad():
            change(holder)
        return holder

    return build


def _by_halves(holder: Holder) -> None:
    holder.weight[:13].normal_()
    holder.weight[13:].copy_(holder.weight[:17] + 1)


def _rows(holder: Holder) -> None:
    holder.weight.normal_()
    holder.weight[3].zero_()
    holder.weight[torch.tensor([0, 5])] = 2.0


def _of_itself(holder: Holder) -> None:
    holder.weight.data = torch.randn(40, 30).t()
    holder.weight.mul_(holder.weight.abs())


def _other_layouts(holder: Holder) -> None:
    """Random numbers go where the indices say, not in the order of memory."""
    holder.weight = nn.Parameter(torch.empty(40, 32).t())
    init.normal_(holder.weight)
    holder.kernel = nn.Parameter(torch.empty(4, 3, 4, 4).to(memory_format=torch.channels_last))
    init.uniform_(holder.kernel)


def _real_becomes_random(holder: Holder) -> None:
    holder.constant.mul_(torch.rand(2)).add_(1)
    init.normal_(holder.vector)
    holder.vector.add_(holder.constant.sum())


def _truncated_in_part(holder: Holder) -> None:
    init.trunc_normal_(holder.weight[:13], std=0.02)
    init.trunc_normal_(holder.weight[13:])


def _of_the_default_dtype(holder: Holder) -> None:
    """Which is another one when the model gets its weights; in double precision more numbers are drawn."""
    with default_dtype(torch.float64):
        holder.weight.copy_(torch.randn(30, 40))
    with default_dtype(torch.bfloat16):
        holder.vector.copy_(torch.rand(7) + torch.rand_like(holder.vector) + torch.full((7,), 0.3))


def _own_generator(holder: Holder) -> None:
    holder.weight.normal_(generator=torch.Generator().manual_seed(5))


def _seeds(holder: Holder) -> None:
    torch.manual_seed(11)
    holder.weight.normal_()


def _shared_storage(holder: Holder) -> None:
    holder.weight.normal_()
    holder.other = nn.Parameter(holder.weight.data[2:5])


def _draws_by_what_was_drawn(holder: Holder) -> None:
    holder.weight.copy_(torch.bernoulli(torch.rand(30, 40)))
    holder.vector.copy_(torch.multinomial(torch.rand(20), 7).float())


def _draws_for_nobody(holder: Holder) -> None:
    """What it draws depends on a tensor that nobody wants either."""
    torch.poisson(torch.rand(20) * 30)
    holder.weight.normal_()


def _copied_from_other_strides(holder: Holder) -> None:
    """Kernels on the meta device give it strides that those on the CPU do not."""
    holder.weight.copy_(torch.poisson(torch.rand(40, 30).t() * 5))


def _tables(holder: Holder) -> None:
    holder.weight.copy_(torch.arange(40) * torch.linspace(0, 1, 30)[:, None])
    holder.table = torch.randperm(9)
    holder.vector[: int(torch.arange(5).max())] = 1.0


def _cast() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 5).half(), nn.Embedding(20, 8, padding_idx=1).to("cpu", torch.bfloat16))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.again = deepcopy(self.norm)
        self.dirac = nn.Conv1d(6, 6, 3)
        init.dirac_(self.dirac.weight)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "nothing but draws": _made(lambda holder: None),
    "truncated normal": _made(lambda holder: init.trunc_normal_(holder.weight, std=0.02)),
    "truncated normal, tails": _made(lambda holder: init.trunc_normal_(holder.weight, a=1.0, b=1.1)),
    "truncated normal, in part": _made(_truncated_in_part),
    "default dtype": _made(_of_the_default_dtype),
    "orthogonal": _made(lambda holder: init.orthogonal_(holder.weight)),
    "sparse": _made(lambda holder: init.sparse_(holder.weight, 0.3)),
    "xavier": _made(lambda holder: init.xavier_normal_(holder.weight)),
    "halves": _made(_by_halves),
    "rows": _made(_rows),
    "of itself": _made(_of_itself),
    "other layouts": _made(_other_layouts),
    "real becomes random": _made(_real_becomes_random),
    "own generator": _made(_own_generator),
    "seeds": _made(_seeds),
    "shared storage": _made(_shared_storage),
    "draws by what was drawn": _made(_draws_by_what_was_drawn),
    "draws for nobody": _made(_draws_for_nobody),
    "other strides": _made(_copied_from_other_strides),
    "tables": _made(_tables),
    "cast": _cast,
    "convolutions": Convolutions,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2),
    "recurrent": lambda: nn.LSTM(4, 8),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)),
}


def unbuilt(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Program]:
    """A model built under Init."""
    torch.manual_seed(seed)
    with Init() as program:
        model = build()
    return model, program


def values_of(model: nn.Module, program: Program, *, num_threads: int = 1) -> Tensors:
    """What the program makes of the model's tensors, and those that are real as they are; draws."""
    tensors = named_tensors(model)
    refs = {name: Ref.of(tensor) for name, tensor in tensors.items() if address(tensor) in program.storages}
    torch.set_rng_state(program.rng_state)
    storages = dict(program.run({ref.storage for ref in refs.values()}, num_threads=num_threads))
    made = {name: ref.view(storages[ref.storage]) for name, ref in refs.items()}
    return {name: tensor.detach() for name, tensor in (tensors | made).items()}
