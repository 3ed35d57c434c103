# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The optimizer in one process: groups, options, state, the auxiliary Adam."""

import copy

import pytest
import torch

from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.layout import GroupLayout
from deepspeed.runtime.zero.muon.matrices import matrices_of
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from unit.v1.ops.muon.oracle import MuonOracle, newton_schulz


def make_params(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def muon(params, **options):
    return MuonWithAuxAdam([dict(params=params, use_muon=True, **options)])


class TestSemantics:

    @pytest.mark.parametrize("ns_method", ["standard", "gram"])
    @pytest.mark.parametrize("nesterov", [True, False])
    def test_equals_the_oracle(self, ns_method, nesterov):
        params = make_params((17, 13), (9, 17), (64, 3), (1, 40), (40, 1))
        oracle = MuonOracle(params, lr=0.03, beta=0.9, weight_decay=0.1, nesterov=nesterov)
        start = [param.detach().clone() for param in params]
        optimizer = muon(params,
                         lr=0.03,
                         momentum=0.9,
                         weight_decay=0.1,
                         nesterov=nesterov,
                         ns_method=ns_method,
                         ns_dtype="float32")
        for step in range(3):
            set_grads(params, step)
            oracle.step([param.grad for param in params])
            optimizer.step()
        for before, expected, found, momentum in zip(start, oracle.weights, params, oracle.momenta):
            # Measured 2e-7 to 4e-6: fp32 against float64, through five steps of the iteration.
            assert (found - expected).norm() <= 3e-5 * (before - expected).norm()
            torch.testing.assert_close(optimizer.state[found]["momentum_buffer"].double(), momentum, rtol=0, atol=1e-6)

    def test_the_gradient_is_left_alone(self):
        params = make_params((8, 6))
        set_grads(params, 1)
        before = params[0].grad.clone()
        muon(params).step()
        assert torch.equal(params[0].grad, before)

    def test_a_convolution_is_out_by_rest(self):
        kernel, flat = make_params((8, 3, 3, 3)), make_params((8, 27))
        flat[0].data.copy_(kernel[0].detach().view(8, 27))
        set_grads(kernel, 2)
        flat[0].grad = kernel[0].grad.view(8, 27).clone()
        muon(kernel).step()
        muon(flat).step()
        assert torch.equal(kernel[0].view(8, 27), flat[0])

    def test_each_expert_on_its_own(self):
        stack, experts = make_params((3, 6, 10)), make_params((6, 10), (6, 10), (6, 10))
        stack[0].is_expert_group = True
        set_grads(stack, 3)
        for index, expert in enumerate(experts):
            expert.data.copy_(stack[0][index].detach())
            expert.grad = stack[0].grad[index].clone()
        optimizer = muon(stack)
        optimizer.step()
        muon(experts).step()
        assert optimizer.orthogonalizations == 3
        assert all(torch.equal(stack[0][index], expert) for index, expert in enumerate(experts))

    def test_each_head_on_its_own(self):
        projection = make_params((12, 8))
        projection[0].muon_num_heads = 3
        before = projection[0].detach().clone()
        set_grads(projection, 4)
        muon(projection, lr=1.0, ns_method="standard", ns_dtype="float32").step()
        for head in range(3):
            rows = slice(4 * head, 4 * head + 4)
            # The first blend is a multiple of the gradient; scale sqrt(max(1, 4/8)) is 1.
            expected = newton_schulz(projection[0].grad[rows])
            torch.testing.assert_close((before - projection[0].detach())[rows].double(), expected, rtol=0, atol=2e-5)

    @pytest.mark.parametrize("adjust_lr_fn, scale", [("original", 2.0), ("match_rms_adamw", 0.2 * 32**0.5)])
    def test_scale(self, adjust_lr_fn, scale):
        params = make_params((32, 8))
        before = params[0].detach().clone()
        set_grads(params, 5)
        muon(params, lr=1.0, ns_method="standard", ns_dtype="float32", adjust_lr_fn=adjust_lr_fn).step()
        torch.testing.assert_close((before - params[0].detach()).double(),
                                   scale * newton_schulz(params[0].grad),
                                   rtol=0,
                                   atol=2e-5)

    def test_options_are_read_at_every_step(self):
        params, twin = make_params((6, 6)), make_params((6, 6))
        scheduled, fixed = muon(params, lr=0.1, momentum=0.5), muon(twin, lr=0.1, momentum=0.5)
        for step in range(2):
            set_grads(params, step)
            set_grads(twin, step)
            scheduled.step()
            fixed.step()
            assert torch.equal(params[0], twin[0]) == (step == 0)
            scheduled.param_groups[0].update(momentum=0.9, lr=0.05, ns_steps=4)

    def test_bf16_parameters_keep_an_fp32_momentum(self):
        params = make_params((8, 8), dtype=torch.bfloat16)
        set_grads(params, 6)
        optimizer = muon(params)
        optimizer.step()
        assert optimizer.state[params[0]]["momentum_buffer"].dtype == torch.float32

    def test_a_missing_gradient_is_a_zero_one(self):
        params = make_params((8, 8), (4, 4))
        before = params[1].detach().clone()
        set_grads(params[:1], 7)
        muon(params, weight_decay=0.5, lr=0.1).step()
        assert torch.equal(params[1], before * (1 - 0.1 * 0.5))

    def test_parameters_without_elements(self):
        params = make_params((0, 4), (4, 4))
        set_grads(params, 8)
        optimizer = muon(params)
        optimizer.step()
        assert optimizer.orthogonalizations == 1

    def test_same_options_share_a_plan_and_others_do_not(self):
        params = make_params((8, 8), (8, 8), (8, 8))
        set_grads(params, 9)
        optimizer = MuonWithAuxAdam([
            dict(params=params[:1], use_muon=True, lr=0.1),
            dict(params=params[1:2], use_muon=True, lr=0.2),
            dict(params=params[2:], use_muon=True, ns_method="standard")
        ])
        optimizer.step()
        assert sorted(sum(report.matrices) for report in optimizer.plan_reports()) == [1, 2]

    def test_a_non_contiguous_parameter(self):
        base = make_params((6, 9))[0]
        strided = torch.nn.Parameter(base.detach().clone().t().contiguous().t())
        assert not strided.is_contiguous()
        for param in (base, strided):
            set_grads([param], 10)
            muon([param]).step()
        assert torch.equal(base, strided)

    def test_closure(self):
        params = make_params((4, 4))

        def closure():
            loss = params[0].square().sum()
            loss.backward()
            return loss

        before = float(params[0].square().sum())
        assert float(muon(params).step(closure)) == pytest.approx(before)
        assert float(params[0].square().sum()) < before


class TestAuxiliaryAdam:

    @pytest.mark.parametrize("adam_w_mode", [True, False])
    def test_is_torchs(self, adam_w_mode):
        params, twin = make_params((6, 6), (6, )), make_params((6, 6), (6, ))
        options = dict(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
        optimizer = MuonWithAuxAdam(
            [dict(params=params[:1], use_muon=True),
             dict(params=params[1:], use_muon=False, **options)],
            adam_w_mode=adam_w_mode)
        reference = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(twin[1:], **options)
        for step in range(3):
            set_grads(params, step)
            set_grads(twin, step)
            optimizer.step()
            reference.step()
        assert torch.equal(params[1], twin[1])
        assert set(optimizer.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}

    def test_a_class_that_cannot_be_built(self):

        class Broken(torch.optim.Adam):

            def __init__(self, params, **kwargs):
                raise RuntimeError("no compiler")

        params = make_params((6, ))
        groups = [dict(params=params, use_muon=False)]
        with pytest.raises(RuntimeError, match="no compiler"):
            MuonWithAuxAdam(groups, adam_optimizer=Broken)
        assert type(MuonWithAuxAdam(groups, adam_optimizer=Broken, fallback_to_inline=True).aux_optimizer) \
            is torch.optim.AdamW

    def test_one_group_at_a_time_as_engines_step(self):
        params, twin = make_params((6, 6), (6, ), (5, 5)), make_params((6, 6), (6, ), (5, 5))

        def make(own):
            return MuonWithAuxAdam([
                dict(params=own[:1], use_muon=True),
                dict(params=own[1:2], use_muon=False),
                dict(params=own[2:], use_muon=True, ns_method="standard")
            ])

        together, apart = make(params), make(twin)
        for step in range(2):
            set_grads(params, step)
            set_grads(twin, step)
            together.step()
            groups = apart.param_groups
            for group in groups:
                apart.param_groups = [group]
                apart.step()
            apart.param_groups = groups
        assert all(torch.equal(one, other) for one, other in zip(params, twin))


class TestState:

    def test_resume_is_exact(self):
        params, twin = make_params((6, 6), (6, )), make_params((6, 6), (6, ))

        def make(own):
            return MuonWithAuxAdam([dict(params=own[:1], use_muon=True), dict(params=own[1:], use_muon=False)])

        first, second = make(params), make(twin)
        for step in range(2):
            set_grads(params, step)
            first.step()
        for param, other in zip(params, twin):
            other.data.copy_(param)
        # Copied, because torch's load_state_dict shares tensors with what it is given.
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for step in range(2, 4):
            for own, optimizer in ((params, first), (twin, second)):
                set_grads(own, step)
                optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(params, twin))

    def test_momentum_of_bf16_parameters_survives_in_fp32(self):
        params = make_params((6, 6), dtype=torch.bfloat16)
        optimizer = muon(params)
        set_grads(params, 0)
        optimizer.step()
        momentum = optimizer.state[params[0]]["momentum_buffer"].clone()
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], momentum)

    def test_a_state_without_the_newer_options(self):
        params = make_params((6, 6))
        optimizer = muon(params)
        state = optimizer.state_dict()
        for key in ("nesterov", "ns_steps", "ns_coefficients", "ns_dtype", "adjust_lr_fn"):
            del state["param_groups"][0][key]
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["ns_steps"] == 5 and optimizer.param_groups[0]["nesterov"] is True

    def test_workspace_is_given_back(self):
        params = make_params((64, 64))
        optimizer = muon(params)
        set_grads(params, 0)
        optimizer.step()
        assert sum(workspace.held_bytes for workspace in optimizer._workspaces.values()) > 0
        optimizer.release_workspace()
        assert sum(workspace.held_bytes for workspace in optimizer._workspaces.values()) == 0
        optimizer.step()


class TestRefused:

    @pytest.mark.parametrize("options, found", [
        (dict(lr=-1), "lr of param group 0 must be a number of at least 0, got -1"),
        (dict(momentum=1.0), "momentum of param group 0"),
        (dict(weight_decay="much"), "weight_decay of param group 0"),
        (dict(nesterov=1), "nesterov of param group 0 must be true or false"),
        (dict(ns_method="exact"), "ns_method of param group 0 must be one of standard, gram"),
        (dict(ns_steps=0), "ns_steps must be an integer of at least 1"),
        (dict(ns_coefficients="best"), "no set is named 'best'"),
        (dict(ns_dtype="int8"), "ns_dtype of param group 0"),
        (dict(ns_method="gram", ns_dtype="bfloat16"), "loses the small singular values"),
        (dict(adjust_lr_fn="none"), "adjust_lr_fn of param group 0 must be one of original, match_rms_adamw"),
    ])
    def test_options(self, options, found):
        with pytest.raises(ValueError, match=found):
            muon(make_params((4, 4)), **options)

    def test_a_group_that_does_not_say(self):
        with pytest.raises(ValueError, match="must say use_muon"):
            MuonWithAuxAdam([dict(params=make_params((4, 4)))])

    def test_a_vector(self):
        params = make_params((4, ))
        set_grads(params, 0)
        with pytest.raises(RuntimeError, match="no layout was bound"):
            muon(params).step()

    def test_workspace_of_nothing(self):
        with pytest.raises(ValueError, match="workspace_mb must be a number above 0"):
            MuonWithAuxAdam([dict(params=make_params((4, 4)), use_muon=True)], workspace_mb=0)

    def test_a_partition_of_another_size(self):
        params = make_params((20, ))
        set_grads(params, 0)
        optimizer = muon(params)
        optimizer.bind(
            params[0],
            GroupLayout.flat(matrices=matrices_of("w", (4, 4)), flat_offsets=[0], world_size=1, partition_numel=16))
        with pytest.raises(RuntimeError, match="a partition of 20 elements is stepped, but its layout has 16"):
            optimizer.step()


class TestPublicNames:

    def test_whole_matrix_optimizers(self):
        for make in (original_muon.Muon, original_muon.SingleDeviceMuon):
            params, twin = make_params((6, 6)), make_params((6, 6))
            set_grads(params, 0)
            set_grads(twin, 0)
            make(params, lr=0.1, momentum=0.9).step()
            muon(twin, lr=0.1, momentum=0.9).step()
            assert torch.equal(params[0], twin[0])
        assert original_muon.MuonWithAuxAdam is MuonWithAuxAdam
        assert issubclass(original_muon.SingleDeviceMuonWithAuxAdam, MuonWithAuxAdam)

    @pytest.mark.parametrize("ns_method", ["standard", "gram"])
    def test_muon_update_takes_the_step_of_the_optimizer(self, ns_method):
        params = make_params((12, 5))
        before = params[0].detach().clone()
        momentum = torch.zeros(12, 5)
        optimizer = muon(params, lr=1.0, ns_method=ns_method)
        for step in range(2):
            set_grads(params, step)
            update = original_muon.muon_update(params[0].grad.clone(), momentum, ns_method=ns_method)
            before -= update
            optimizer.step()
        torch.testing.assert_close(params[0].detach(), before, rtol=0, atol=1e-5)
