# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a step runs: what overlaps what, how many launches it takes, and that nothing in it waits for a device."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.runtime.zero.muon.coefficients import launches, padded, uses_gram
from deepspeed.runtime.zero.muon.exchange import run_rounds
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.pack import Workspace, parts_of
from deepspeed.runtime.zero.muon.plan import LocalFragment, rank_plan
from deepspeed.runtime.zero.muon.step import MuonStep, Partition
from unit.v1.ops.muon import simulate
from unit.v1.ops.muon.simulate import (KERNEL, SimulatedExchange, gather, on_all_ranks, plan_for, scatter,
                                       simulate_steps)
from unit.v1.ops.muon.test_layout import flat_layout, sharded_layout
from unit.v1.ops.muon.test_plan import BF16_WIRE, LAYOUTS, STANDARD, random_matrices, replicated_layout

# What makes the host wait for a device, or depends on data and so does: values read, sizes that are found out.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")


class Calls(TorchDispatchMode):
    """Counts the operations of a block by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(layout, kernel, round_numel=1 << 20):
    """The operations of each rank's second step, and its plan."""
    plan = plan_for([layout], kernel, round_numel)

    def rank_work(exchange):
        weight = torch.ones(layout.partition_numel)
        partition = Partition(weight, torch.randn_like(weight), torch.zeros_like(weight), 0.1, 0.1, 0.9, True,
                              "original")
        own = rank_plan(plan, exchange.rank)
        step = MuonStep(own, kernel, exchange, Workspace(torch.device("cpu")))
        step.run([partition])
        with Calls() as calls:
            step.run([partition])
        return calls.counts, own

    return on_all_ranks(layout.world_size, rank_work)


class _Recorded:
    """The work of rounds as a list of what was called, and handles that say when they were waited for."""

    def __init__(self):
        self.events = []

    def __getattr__(self, name):
        if name not in ("pack", "send_to_owners", "assemble", "orthogonalize", "send_back", "apply_kept",
                        "apply_returned"):
            raise AttributeError(name)

        def call(index):
            self.events.append((name, index))
            return _RecordedHandle(self, name, index) if name.startswith("send") else None

        return call


class _RecordedHandle:

    def __init__(self, work, name, index):
        self.work, self.name, self.index = work, name, index

    def wait(self):
        self.work.events.append((f"wait {self.name}", self.index))


class TestOverlap:

    def test_both_ways_are_in_flight_while_a_round_is_orthogonalized(self):
        work = _Recorded()
        run_rounds(work, 4, lambda: work.events.append(("meanwhile", 0)))
        place = {event: position for position, event in enumerate(work.events)}
        assert len(place) == len(work.events)
        for index in range(1, 3):
            now = place["orthogonalize", index]
            assert place["send_to_owners", index + 1] < now < place["wait send_to_owners", index + 1]
            assert place["send_back", index - 1] < now < place["wait send_back", index - 1]
        assert place["send_back", 3] < place["meanwhile", 0] < place["wait send_back", 3]

    @pytest.mark.parametrize("count", [0, 1, 2, 5])
    def test_every_round_does_everything_in_its_order(self, count):
        work = _Recorded()
        run_rounds(work, count)
        for index in range(count):
            assert [name for name, number in work.events if number == index] == [
                "pack", "send_to_owners", "wait send_to_owners", "assemble", "orthogonalize", "send_back",
                "apply_kept", "wait send_back", "apply_returned"
            ]

    @pytest.mark.parametrize("count", [0, 1])
    def test_other_work_is_done_without_rounds_too(self, count):
        done = []
        run_rounds(_Recorded(), count, lambda: done.append(1))
        assert done == [1]

    def test_the_auxiliary_adam_steps_while_the_last_update_travels(self, monkeypatch):
        events = []
        weight, bias = torch.nn.Parameter(torch.ones(4, 6)), torch.nn.Parameter(torch.ones(3))
        optimizer = MuonWithAuxAdam([dict(params=[weight], use_muon=True), dict(params=[bias], use_muon=False)])
        for name in ("send_back", "apply_returned"):
            original = getattr(MuonStep, name)
            monkeypatch.setattr(MuonStep,
                                name,
                                lambda step, index, name=name, original=original:
                                (events.append(name), original(step, index))[1])
        adam = optimizer.aux_optimizer.step
        monkeypatch.setattr(optimizer.aux_optimizer, "step", lambda: (events.append("adam"), adam())[1])
        weight.grad, bias.grad = torch.ones(4, 6), torch.ones(3)
        optimizer.step()
        assert events == ["send_back", "adam", "apply_returned"]
        assert (bias != 1).all() and (weight != 1).any()

    def test_adam_alone_steps(self):
        bias = torch.nn.Parameter(torch.ones(3))
        optimizer = MuonWithAuxAdam([dict(params=[bias], use_muon=False)])
        bias.grad = torch.ones(3)
        optimizer.step()
        assert (bias != 1).all()


class LateExchange(SimulatedExchange):
    """An exchange that reads and writes its buffers when it is waited for: as late as a real one may."""

    def start_all_to_all(self, output, source, output_splits, source_splits):
        start, buffers = super().start_all_to_all, (output, source, output_splits, source_splits)
        output.fill_(float("nan"))

        class Late:

            def wait(self):
                start(*buffers)

        return Late()


@pytest.mark.parametrize("kind", sorted(LAYOUTS) + ["replicated"])
@pytest.mark.parametrize("kernel", [KERNEL, BF16_WIRE], ids=["gram", "bf16 wire"])
def test_no_buffer_is_touched_while_it_is_in_flight(monkeypatch, kind, kernel):
    shapes = [(20, 30), (30, 20), (9, 13), (64, 3), (16, 16), (33, 31), (20, 30)]
    layout = {**LAYOUTS, "replicated": replicated_layout}[kind](shapes, 3)
    weights, grads = random_matrices(shapes, 1), random_matrices(shapes, 2, steps=2)
    options = dict(kernel=kernel, round_numel=1000)
    early, ranks = simulate_steps(layout, weights, grads, **options)
    monkeypatch.setattr(simulate, "SimulatedExchange", LateExchange)
    late, late_ranks = simulate_steps(layout, weights, grads, **options)
    assert [rank["exchanges"] for rank in ranks] == [rank["exchanges"] for rank in late_ranks]
    assert ranks[0]["exchanges"] >= 2 * 2
    assert all(torch.equal(one, other) for one, other in zip(early, late))


class TestLaunches:

    @pytest.mark.parametrize("kernel", [KERNEL, STANDARD], ids=["gram", "standard"])
    @pytest.mark.parametrize("kind", sorted(LAYOUTS))
    def test_as_many_products_as_distinct_shapes(self, kind, kernel):
        """However many matrices: 12, 24 and 48 of four shapes, of which two are transposed to each other."""
        steps = len(kernel.triples)
        for copies in (3, 6, 12):
            layout = LAYOUTS[kind]([(32, 64), (64, 32), (48, 48), (16, 100)] * copies, 2)
            for counts, own in calls_of_a_step(layout, kernel):
                expected = 0
                for found in own.rounds:
                    shapes = {(*sorted(
                        (padded(batch.rows), padded(batch.cols))), uses_gram(kernel.method, batch.rows, batch.cols))
                              for batch in found.batches}
                    expected += sum(launches(gram, steps) for _, _, gram in shapes)
                assert counts["bmm"] + counts["baddbmm"] == expected
                assert len(own.rounds) <= 2 and expected <= 2 * 3 * 4 * steps

    @pytest.mark.parametrize("kernel", [KERNEL, BF16_WIRE], ids=["gram", "bf16 wire"])
    @pytest.mark.parametrize("kind", sorted(LAYOUTS) + ["replicated"])
    def test_nothing_waits_for_a_device(self, kind, kernel):
        layout = {**LAYOUTS, "replicated": replicated_layout}[kind]([(20, 30), (30, 20), (9, 13), (64, 3)], 2)
        for counts, _ in calls_of_a_step(layout, kernel, round_numel=600):
            assert not {name for name in counts if name.startswith(WAITS)}, counts

    def test_a_wait_would_be_found(self):
        with Calls() as calls:
            float(torch.ones(1))
            torch.ones(2).nonzero()
        assert {name for name in calls.counts if name.startswith(WAITS)} == {"_local_scalar_dense", "nonzero"}


def places(fragments):
    """(partition, matrix, place in the partition, place in the buffer) of each element."""
    for partition, f in fragments:
        strip = f.numel // f.strips
        for k in range(f.numel):
            place = f.offset_in_partition + k // strip * f.stride + k % strip
            yield partition, f.matrix, place, f.offset_in_buffer + k


class TestParts:

    def test_slices_cover_the_fragments_and_no_part_is_larger_than_allowed(self):
        fragments = [
            LocalFragment(0, 0, 5, 250, 0),
            LocalFragment(1, 0, 255, 30, 250),
            LocalFragment(2, 1, 0, 99, 280),
            # 9 strips of 5 elements, 8 apart.
            LocalFragment(3, 1, 100, 45, 379, 9, 8)
        ]
        for limit in (None, 1000, 100, 7):
            parts = parts_of(fragments, limit)
            pieces = [(part.partition, piece) for part in parts for piece in part.fragments]
            assert sorted(places(pieces)) == sorted(places([(f.partition, f) for f in fragments]))
            assert [part.numels for part in parts] == [tuple(f.numel for f in part.fragments) for part in parts]
            assert limit is None or max(sum(part.numels) for part in parts) <= limit
        assert len(parts_of(fragments, None)) == 2
        assert parts_of([], 10) == ()

    def test_the_size_of_the_parts_changes_no_bit(self, monkeypatch):
        """The norm is summed in another order, in float64: see the docstring of squared_norms."""
        shapes = [(40, 50), (33, 7), (64, 64)]
        weights, grads = random_matrices(shapes, 3), random_matrices(shapes, 4, steps=2)
        whole, _ = simulate_steps(sharded_layout(shapes, 2), weights, grads)
        monkeypatch.setattr("deepspeed.runtime.zero.muon.step.CPU_SLICE_NUMEL", 1)
        monkeypatch.setattr("deepspeed.runtime.zero.muon.step.MIN_CPU_PART_NUMEL", 129)
        cut, _ = simulate_steps(sharded_layout(shapes, 2), weights, grads)
        assert all(torch.equal(one, other) for one, other in zip(whole, cut))


def test_partitions_of_several_layouts_step_together():
    """Two partition tensors in one plan, as two param groups of one engine are."""
    layouts = [flat_layout([(12, 20), (8, 8)], 2), sharded_layout([(20, 12)], 2)]
    weights = [random_matrices([(12, 20), (8, 8)], 5), random_matrices([(20, 12)], 6)]
    grads = [random_matrices([(12, 20), (8, 8)], 7), random_matrices([(20, 12)], 8)]
    plan = plan_for(layouts)
    options = dict(lr=0.02, weight_decay=0.1, beta=0.95, nesterov=True, adjust_lr_fn="original")

    def rank_work(exchange):
        held = [scatter(layout, whole, exchange.rank) for layout, whole in zip(layouts, weights)]
        step = MuonStep(rank_plan(plan, exchange.rank), KERNEL, exchange, Workspace(torch.device("cpu")))
        step.run([
            Partition(weight, scatter(layout, grad, exchange.rank), torch.zeros_like(weight), **options)
            for layout, weight, grad in zip(layouts, held, grads)
        ])
        return held

    found = on_all_ranks(2, rank_work)
    for index, layout in enumerate(layouts):
        alone, _ = simulate_steps(layout, weights[index], [grads[index]])
        together = gather(layout, [held[index] for held in found])
        assert all(torch.equal(one, other) for one, other in zip(alone, together))
