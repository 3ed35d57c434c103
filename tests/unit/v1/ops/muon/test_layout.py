# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.zero.muon.layout import Fragment, GroupLayout
from deepspeed.runtime.zero.muon.matrices import Matrix, matrices_of
from unit.v1.ops.muon.simulate import gather, scatter

SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 40)) | st.tuples(st.integers(1, 7), st.integers(1, 300))


def matrix(name, rows, cols, offset=0):
    return Matrix(name, rows, cols, offset, rows, cols)


def flat_layout(shapes, world_size, gap=0, alignment=1):
    matrices = [matrix(f"m{i}", *shape) for i, shape in enumerate(shapes)]
    offsets, end = [], 0
    for found in matrices:
        offsets.append(end)
        end += found.numel + gap
    partition_numel = -(-end // (world_size * alignment)) * alignment
    return GroupLayout.flat(matrices=matrices,
                            flat_offsets=offsets,
                            world_size=world_size,
                            partition_numel=partition_numel)


def sharded_layout(shapes, world_size):
    parameters = [matrices_of(f"p{i}", shape) for i, shape in enumerate(shapes)]
    return GroupLayout.sharded(parameters=parameters,
                               parameter_numels=[rows * cols for rows, cols in shapes],
                               world_size=world_size)


def check_invariants(layout):
    """Cover and disjoint, from the fragments themselves; `on_rank`, `holders` and `runs` agree with `fragments`."""
    used = [torch.zeros(layout.partition_numel, dtype=torch.int) for _ in range(layout.world_size)]
    for found, placement in zip(layout.matrices, layout.placements):
        fragments = list(placement.fragments())
        covered = 0
        for fragment in fragments:
            assert fragment.offset_in_matrix == covered and fragment.numel > 0
            covered += fragment.numel
            used[fragment.rank][fragment.offset_in_partition:fragment.offset_in_partition + fragment.numel] += 1
        assert covered == found.numel
        assert list(placement.holders()) == sorted({fragment.rank for fragment in fragments})
        for rank in range(layout.world_size):
            assert list(placement.on_rank(rank)) == [fragment for fragment in fragments if fragment.rank == rank]
        per_rank = {}
        for run in placement.runs():
            for rank in range(run.first_rank, run.last_rank + 1):
                per_rank[rank] = per_rank.get(rank, 0) + run.numel
        for rank, numel in per_rank.items():
            assert numel == sum(fragment.numel for fragment in fragments if fragment.rank == rank)
    assert all((count <= 1).all() for count in used)


@settings(deadline=None, max_examples=60)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=6), world_size=st.integers(1, 16), gap=st.integers(0, 3))
def test_flat_covers_and_is_disjoint(shapes, world_size, gap):
    check_invariants(flat_layout(shapes, world_size, gap, alignment=4))


@settings(deadline=None, max_examples=60)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=6), world_size=st.integers(1, 16))
def test_sharded_covers_and_is_disjoint(shapes, world_size):
    check_invariants(sharded_layout(shapes, world_size))


@settings(deadline=None, max_examples=30)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=4), world_size=st.integers(1, 5), seed=st.integers(0, 99))
def test_values_survive_the_way_to_partitions_and_back(shapes, world_size, seed):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    for layout in (flat_layout(shapes, world_size), sharded_layout(shapes, world_size)):
        partitions = [scatter(layout, values, rank) for rank in range(world_size)]
        for whole, found in zip(values, gather(layout, partitions)):
            assert torch.equal(whole, found)


def test_listed_equals_the_uniform_cut_it_lists():
    layout = flat_layout([(3, 5), (4, 4)], 3)
    listed = GroupLayout.listed(matrices=layout.matrices,
                                fragments=[list(placement.fragments()) for placement in layout.placements],
                                world_size=3,
                                partition_numel=layout.partition_numel)
    check_invariants(listed)
    for uniform, found in zip(layout.placements, listed.placements):
        assert list(uniform.fragments()) == list(found.fragments())


def test_a_straddle_by_one_element():
    layout = flat_layout([(3, 3), (3, 3)], 2)
    assert [layout.straddles(0), layout.straddles(1)] == [False, False]
    layout = GroupLayout.flat(matrices=layout.matrices, flat_offsets=[1, 10], world_size=2, partition_numel=18)
    assert [layout.straddles(0), layout.straddles(1)] == [False, True]
    assert [f.numel for f in layout.placements[1].fragments()] == [8, 1]


class TestRefused:
    """The message names the parameter and the offending range."""

    def test_out_of_bounds(self):
        with pytest.raises(ValueError, match=r"wq occupies \[8, 24\) of a flat buffer of 20"):
            GroupLayout.flat(matrices=[matrix("wq", 4, 4)], flat_offsets=[8], world_size=2, partition_numel=10)

    def test_overlap(self):
        with pytest.raises(ValueError, match=r"wk occupies \[15, 31\), which overlaps wq up to 16"):
            GroupLayout.flat(matrices=[matrix("wq", 4, 4), matrix("wk", 4, 4)],
                             flat_offsets=[0, 15],
                             world_size=2,
                             partition_numel=32)

    def test_shards_overlap(self):
        parameters = [matrices_of("wq", (4, 4)), matrices_of("wk", (4, 4))]
        with pytest.raises(ValueError, match="wk: its shard starts at 7, which overlaps the one up to 8"):
            GroupLayout.sharded(parameters=parameters,
                                parameter_numels=[16, 16],
                                world_size=2,
                                shard_offsets=[0, 7],
                                partition_numel=20)

    def test_shard_leaves_the_partition(self):
        with pytest.raises(ValueError, match=r"wq: its shard \[5, 13\) leaves the partition of 12"):
            GroupLayout.sharded(parameters=[matrices_of("wq", (4, 4))],
                                parameter_numels=[16],
                                world_size=2,
                                shard_offsets=[5],
                                partition_numel=12)

    def test_matrix_larger_than_its_parameter(self):
        with pytest.raises(ValueError, match=r"wq occupies \[0, 16\) of a parameter of 15"):
            GroupLayout.sharded(parameters=[matrices_of("wq", (4, 4))], parameter_numels=[15], world_size=2)

    @pytest.mark.parametrize("fragments, found", [
        ([Fragment(0, 0, 0, 5)], r"its fragments cover \[0, 5\) of 6"),
        ([Fragment(0, 0, 0, 3), Fragment(1, 4, 0, 2)], "starts at 4, expected 3"),
        ([Fragment(0, 0, 0, 4), Fragment(1, 3, 0, 3)], "starts at 3, expected 4"),
        ([Fragment(2, 0, 0, 6)], "on rank 2 leaves the partition"),
        ([Fragment(0, 0, 5, 6)], r"\[5, 11\) on rank 0 leaves the partition of 10"),
    ])
    def test_listed(self, fragments, found):
        with pytest.raises(ValueError, match=f"wq.*{found}"):
            GroupLayout.listed(matrices=[matrix("wq", 2, 3)], fragments=[fragments], world_size=2, partition_numel=10)

    def test_listed_matrices_that_share_elements(self):
        with pytest.raises(ValueError,
                           match=r"wk occupies \[5, 11\) of rank 0's partition, which overlaps wq up to 6"):
            GroupLayout.listed(matrices=[matrix("wq", 2, 3), matrix("wk", 2, 3)],
                               fragments=[[Fragment(0, 0, 0, 6)], [Fragment(0, 0, 5, 6)]],
                               world_size=1,
                               partition_numel=12)


class TestMatricesOf:

    def test_plain(self):
        assert matrices_of("w", (6, 4)) == (Matrix("w", 6, 4, 0, 6, 4), )

    @pytest.mark.parametrize("shape, cols", [((8, 3, 5), 15), ((8, 4, 3, 3), 36), ((8, 4, 2, 3, 3), 72)])
    def test_convolutions_are_out_by_rest(self, shape, cols):
        assert matrices_of("conv", shape) == (Matrix("conv", 8, cols, 0, 8, cols), )

    def test_expert_stack(self):
        found = matrices_of("experts", (3, 4, 5), expert_stack=True)
        assert [m.offset_in_parameter for m in found] == [0, 20, 40]
        assert [m.name for m in found] == ["experts[0]", "experts[1]", "experts[2]"]
        assert {(m.rows, m.cols) for m in found} == {(4, 5)}

    def test_parts_of_each_expert(self):
        found = matrices_of("experts", (2, 6, 5), expert_stack=True, parts=[4, 2])
        assert [(m.rows, m.offset_in_parameter) for m in found] == [(4, 0), (2, 20), (4, 30), (2, 50)]

    def test_transposed_storage_changes_only_the_fans(self):
        assert matrices_of("c_attn", (4, 12), transposed=True) == (Matrix("c_attn", 4, 12, 0, 12, 4), )

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 3, 0)])
    def test_nothing_in_an_empty_parameter(self, shape):
        assert matrices_of("w", shape) == ()

    @pytest.mark.parametrize("shape, options, found", [
        ((5, ), {}, r"w has shape \(5,\)"),
        ((2, 3), dict(expert_stack=True), "marked as an expert stack"),
        ((6, 3), dict(parts=[4, 3]), r"w has 6 outputs, which do not split into parts of \[4, 3\]"),
        ((6, 3), dict(parts=[6, 0]), "do not split"),
    ])
    def test_refused(self, shape, options, found):
        with pytest.raises(ValueError, match=found):
            matrices_of("w", shape, **options)
