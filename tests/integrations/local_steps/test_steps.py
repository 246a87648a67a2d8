"""Local steps of a plain module: what they are equal to, what is conserved, and what goes wrong."""

import copy
import functools
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from powersgd_triton import PowerSGDConfig
from powersgd_triton.comm.agreement import exhaust
from powersgd_triton.integrations.local_steps import LocalSteps
from powersgd_triton.ops.step import HostCopy
from powersgd_triton.schemes.quantized import QuantizedAverage
from tests.support.distributed import make_test
from tests.support.local_steps import (
    NESTEROV,
    TERNARY,
    WITH_MOMENTUM,
    Training,
    flat,
    mean,
    model,
    owed,
    same_bits,
    theta,
)
from tests.support.training import complaint, logged, warnings

STEPS, EVERY = 12, 4


def takes_rounds_that_grow(worker: int, _world_size: int) -> None:
    """Exchanges after 3 and 9 steps, and the last one."""
    training = Training(worker, delay=2, every=lambda steps: 3 + steps)
    training.train(14)
    assert training.sync.every == 12
    training.finish()
    assert training.sync.iteration == 3


def equals_diloco(worker: int, _world_size: int) -> None:
    """Exact messages are DiLoCo. Averaging of parameters is tested with wrappers."""
    got = Training(worker, "exact", EVERY, optimizer=WITH_MOMENTUM, outer=NESTEROV)
    assert torch.equal(got.start, flat(model()))
    apart, shared = Training(worker, every=99, optimizer=WITH_MOMENTUM), model()
    outer = NESTEROV(shared.parameters())
    for _ in range(STEPS // EVERY):
        apart.train(EVERY)
        for ours, local in zip(shared.parameters(), apart.net.parameters(), strict=True):
            ours.grad = mean(ours.data - local.data)
        outer.step()
        apart.net.load_state_dict(shared.state_dict())
    got.train(STEPS)
    assert (got.flat() - flat(shared)).abs().max() <= 1e-5 < 0.01 < (got.flat() - got.start).abs().max()


class Other(torch.optim.SGD):
    """An optimizer that needs gradients, for all that is known of it."""


def adds_averages_to_theta(worker: int, _world_size: int) -> None:
    """A plain outer SGD does so without a gradient, and ends where another optimizer with its rate ends."""
    spy = functools.partial(mock.patch.object, QuantizedAverage, "add_to", autospec=True)
    for config, delay, keep in (("ternary", 0, None), ("sparse", 1, 0.9), ("int8", 1, None)):
        found = []
        for optimizer in (torch.optim.SGD, Other):
            outer = functools.partial(optimizer, lr=0.8)
            training = Training(worker, config, EVERY, outer=outer, delay=delay, keep=keep)
            with spy(side_effect=QuantizedAverage.add_to) as add:
                training.train(STEPS)
                training.sync.finish()
            assert add.called == (optimizer is torch.optim.SGD)
            assert same_bits(theta(training.sync))
            assert all(parameter.grad is None for parameter in training.sync._outer.shared.values())
            found.append(theta(training.sync))
        assert (found[0] - found[1]).abs().max() <= 1e-5 < 0.01 < (found[0] - flat(model())).abs().max()
    plain = Training(worker)
    rates: Any = [0.5, torch.tensor(0.25)]
    several = Training(worker, outer=lambda p: torch.optim.SGD([{"params": p[i::2], "lr": rates[i]} for i in (0, 1)]))
    assert several.sync._outer.rate() is None
    if worker == 0:
        plain.sync.outer.register_step_pre_hook(lambda *_: None)
    assert "outer adds a multiple of the mean" in complaint(plain.train, 3)


class Reads(TorchDispatchMode):
    """Counts where the host reads a tensor that a step has computed, for which it would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
            self.number += 1
        return func(*args, **(kwargs or {}))


def reads_once(worker: int, _world_size: int) -> None:
    """The host reads once what decides about an exchange, however many buffers there are, and when it ends."""
    tolist, numbers = torch.Tensor.tolist, HostCopy.numbers
    for delay in (0, 2):
        net = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(4)])
        net.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        sync = LocalSteps(net, PowerSGDConfig(quantize="int8"), every=3, delay=delay)
        meeting = sync._rounds._meeting
        for step in range(1, 10):
            net(torch.randn(4, 3, generator=torch.Generator().manual_seed(worker + 10 * step)))
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.1 * worker)

            def on_host(act: Any, *arguments: Any) -> Any:
                with _disable_current_modes(), mock.patch.object(torch.Tensor, "tolist", tolist):
                    return act(*arguments)

            def on_host_too(*arguments: Any, meeting: Any = meeting, **options: Any) -> Any:
                run = meeting(*arguments, **options)
                yield on_host(next, run)
                return on_host(exhaust, run)

            copies = mock.Mock(side_effect=tolist)
            with (
                # As on a GPU, where nothing is decided on the host.
                mock.patch("powersgd_triton.core.whole.on_host", return_value=False),
                mock.patch("powersgd_triton.ops.differences.on_host", return_value=False),
                mock.patch("powersgd_triton.ops.reference.on_host", return_value=False),
                # What the workers compare lies on the host, and what was copied in an earlier step.
                mock.patch.object(sync._rounds, "_meeting", on_host_too),
                mock.patch.object(HostCopy, "numbers", lambda copy: on_host(numbers, copy)),
                mock.patch.object(torch.Tensor, "tolist", lambda tensor, copies=copies: copies(tensor)),
                Reads() as reads,
            ):
                sync.step()
            # In the first exchange, the workers agree on more.
            if step > 5:
                assert reads.number + copies.call_count == ((step - delay) % 3 == 0), (delay, step)


def averages_states(worker: int, _world_size: int) -> None:
    """An optimizer's, exactly, on request. Buffers that stay are not sent; the fuzzer averages others."""
    net: Any = nn.Linear(3, 3)
    net.register_buffer("mask", torch.ones(500, dtype=torch.bool))
    net.register_buffer("least", torch.full((2,), -torch.inf))
    optimizer = torch.optim.Adam(net.parameters())
    sync = LocalSteps(net, TERNARY, every=2, optimizer=optimizer)
    for step in range(4):
        net(torch.randn(4, 3, generator=torch.Generator().manual_seed(worker + 10 * step))).square().sum().backward()
        optimizer.step()
        found = [optimizer.state[p]["exp_avg"] for p in net.parameters()]
        own, expected = copy.deepcopy(found), [mean(tensor) for tensor in found]
        before = sync._engine.sent
        sync.step()
        for average, exact, local in zip(found, expected, own, strict=True) if step % 2 else ():
            assert (average - exact).abs().max() <= 1e-6 * exact.abs().max()
            assert not torch.equal(average, local)
    assert sync._engine.sent - before < 500


def takes_in_what_trains_later(worker: int, _world_size: int) -> None:
    """What is unfrozen is averaged; new parameters begin as the first worker's, and new buffers are averaged."""
    net: Any = model()
    net[0].requires_grad_(False)
    training = Training(worker, "rank", EVERY, net=net, delay=2)
    training.train(EVERY + 2)
    net[0].requires_grad_(True)
    training.unfreeze(net[0].parameters())
    training.train(EVERY)
    training.finish()
    net.late = nn.Parameter(torch.full((4,), worker + 1.0))
    net.register_buffer("average", torch.full((3,), worker * 2.0))
    training.train(1)
    training.sync.finish()
    assert net.late.tolist() == [1.0] * 4
    assert net.average.tolist() == [1.0] * 3
    net.late.data += worker * 2.0
    training.train(1)
    training.sync.finish()
    assert net.late.mean() == 2.0
    narrow: Any = model().bfloat16()
    narrow[0].requires_grad_(False)
    sync = LocalSteps(narrow, TERNARY, every=1)
    narrow[0].requires_grad_(True).weight.data.fill_(1 + worker / 128)
    sync.step()
    assert (sync.shared()["0.weight"] == 1 + 1 / 256).all(), "the mean is rounded"


def finishes_once(worker: int, _world_size: int) -> None:
    """Nothing is sent where nothing was changed, also if the workers' own parameters are θ in 16 bits."""
    training = Training(worker, every=EVERY, net=model(worker).bfloat16(), delay=1, outer=NESTEROV)
    training.train(2 * EVERY)
    ends = []
    for _ in range(2):
        training.sync.finish()
        ends.append((training.sync.iteration, theta(training.sync)))
    assert ends[0][0] == ends[1][0] == 2
    assert torch.equal(ends[0][1], ends[1][1])


def tries_again(worker: int, _world_size: int) -> None:
    """If an outer optimizer raises an exception on one worker, the next step calls it again, and nothing is lost.

    A second exception comes in a step that does not count, since an exchange may have to begin in it.
    """
    cases = ((3, 0, None, 1), (3, 2, None, 1), (3, 2, 1.0, 2), (1, 0, None, 2), (2, 1, None, 2))
    for every, delay, keep, times in cases:
        training = Training(worker, every=every, delay=delay, keep=keep, outer=lambda p: torch.optim.SGD(p, lr=1.0))
        outer, failed, failing = training.sync.outer, [], range(every + delay - 1, every + delay - 1 + times * worker)
        for step in range(9 + len(failing[1:])):
            effect = KeyError("a mistake") if step in failing else None
            with mock.patch.object(outer, "step", wraps=outer.step, side_effect=effect):
                said = complaint(training.train, 1)
            failed += [] if said == "nothing" else [step]
            training.done = step + 1
        assert (failed, training.sync.steps) == ([*failing], 9)
        training.finish()


def finishes_after_other_numbers_of_steps(worker: int, world_size: int) -> None:
    """Messages of the exchange under way come before what decides about it, wherever a worker is in its delay."""
    config = "rank" if world_size == 2 else "ternary"
    for delay, ahead in ((2, 1), (3, 2)):
        training = Training(worker, config, 5, delay=delay)
        training.net.register_buffer("average", torch.zeros(3))
        training.train(10 + ahead * (worker == 0))
        training.net.get_buffer("average").add_(worker)
        training.finish()
        training.train(5 + ahead * (worker == 0))
        training.sync.forget()
        assert not owed(training.sync).any()
        assert same_bits(training.flat())


def keeps_what_is_not_sent(worker: int, _world_size: int) -> None:
    """A share of it stays in each worker's parameters, and the rest decays. ``finish`` leaves θ there."""
    for config in ("ternary", "sparse", "rank", "alternating"):
        training, keep = Training(worker, config, 1, keep=0.5), 0.5
        decayed = torch.zeros(len(training.start))
        for _ in range(6):
            training.train(1)
            decayed += (1 - keep) / keep * mean(theta(training.sync) - training.flat())
        # Of all changes, θ has what arrived, the workers' own parameters what they keep, and the rest has decayed.
        kept = mean(theta(training.sync) - training.flat())
        lost = mean(training.changed) - (training.start - theta(training.sync)) - kept
        assert decayed.abs().max() > 1e-4
        torch.testing.assert_close(lost, decayed, rtol=0, atol=1e-6)
        for delay in (0, 2):
            training = Training(worker, config, EVERY, keep=1.0, delay=delay)
            training.train(2 * EVERY + delay)
            assert not owed(training.sync).any()
            training.check()
            own = training.flat()
            with training.sync.shared_parameters():
                assert torch.equal(training.flat(), theta(training.sync))
            assert torch.equal(training.flat(), own)
            training.finish()
            assert owed(training.sync).any()
            training.train(EVERY)
            training.finish()


def copies_held(keep: float | None) -> int:
    """How many tensors as large as the model a worker has between two exchanges, its own parameters included."""
    net = nn.Linear(128, 256, bias=False)
    earlier = {id(x): x for x in gc.get_objects() if type(x) is Tensor}
    sync = LocalSteps(net, PowerSGDConfig(quantize="sparse", compression=100), 1, keep=keep)
    for _ in range(3):
        net.weight.data += torch.randn_like(net.weight)
        sync.step()
    assert bool(sync.report().error_bytes) == (keep is None)
    found = (x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and id(x) not in earlier)
    return len({x.untyped_storage().data_ptr() for x in found if x.untyped_storage().nbytes() >= net.weight.nbytes})


def keeps_no_errors_apart(_worker: int, _world_size: int) -> None:
    """With ``keep``, a worker's own parameters and θ are all that it holds, besides messages."""
    assert (copies_held(0.9), copies_held(None)) == (2, 3)


ANY_NUMBER = [equals_diloco, adds_averages_to_theta, averages_states, reads_once, finishes_after_other_numbers_of_steps]
MORE = [takes_rounds_that_grow, takes_in_what_trains_later, finishes_once, tries_again, keeps_what_is_not_sent]
test_two_workers = make_test([*ANY_NUMBER, *MORE, keeps_no_errors_apart], 2)
test_three_workers = pytest.mark.slow(make_test(ANY_NUMBER, 3))


def test_one_worker() -> None:
    assert not dist.is_initialized()
    training = Training(0)
    training.train(6)
    assert not torch.equal(flat(training.net), training.start)
    assert torch.equal(flat(training.net), theta(training.sync))
    assert training.sync.iteration == 2
    assert "An exchange comes every 3 steps" in str(training.sync.report())
    with pytest.raises(TypeError, match="have no loss scale"):
        training.sync.attach(torch.amp.GradScaler("cpu"))
    # In the last exchange, which ``finish`` makes or follows.
    for steps in (1, 3):
        training.train(steps - 1)
        next(training.net.parameters()).data[0, 0] = torch.nan
        with logged("powersgd_triton.integrations.local_steps") as messages:
            training.train(1)
            training.sync.finish()
        assert ["not finite" in text for text in warnings(messages)] == [True]
        assert flat(training.net).isfinite().all()
