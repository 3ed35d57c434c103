# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The commits of the PR series, in order, and the directories of upstream's that ours take the place of."""

from forkbuild.patchset import Commit, Replace

SERIES = [
    Commit(
        key="package",
        subject="Muon: one implementation that works on partition slices",
        body="""\
Each ZeRO engine has a Muon of its own, with its own wire format and its own semantics, so the same configuration
trains differently under different stages. This package runs inside optimizer.step(): it is told once which slice of
which matrix lies where, exchanges slices with the owner of each matrix, and orthogonalizes every matrix once in the
whole world. The public names of the package stay as they are.

No engine uses it yet. The commits that follow move them over, one each.
""",
        files=("deepspeed/runtime/zero/muon/*.py", ),
    ),
    Commit(
        key="options",
        subject="Muon: refuse unknown optimizer keys",
        body="""\
The Muon branch of the engine picks the keys it knows out of the optimizer's params and drops the rest without a word.
A mistyped `momentun`, or a key that another Muon has, trained with the default instead, and nothing said so. Every key
is now checked before it is read. The error lists the valid keys and, where one is close, says which was meant. Keys of
param groups are held to the same, because the engine makes groups of its own and keeps only what it knows.
""",
    ),
    Commit(
        key="engine",
        subject="Muon: hand the engine's options and limits to the optimizer",
        body="""\
The optimizer reads more options from its param groups than the engine passed on, and bounds its buffers by the buckets
that the engine itself makes. An optimizer that needs whole matrices and gets partitions is refused at initialize, not
at the first step.
""",
    ),
    Commit(
        key="bf16_optimizer",
        subject="Muon: BF16_Optimizer tells the optimizer its layout",
        body="""\
BF16_Optimizer's own exchange goes. It orthogonalized every split matrix once on each of its holders; what is left is
one call that says where the slices lie.
""",
    ),
    Commit(
        key="stage_1_and_2",
        subject="Muon: ZeRO-1 and ZeRO-2 tell the optimizer their layout",
        body="""\
The partition was filled with orthogonalized updates, so the norm and the clip were taken over these and not over the
gradients, each holder of a split matrix kept its whole momentum twice, and with CPU offload every rank orthogonalized
every matrix. The partition now holds the gradient, as for every other optimizer, and one call says where the slices
lie.
""",
    ),
    Commit(
        key="stage3",
        subject="Muon: ZeRO-3 tells the optimizer its layout",
        body="""\
ZeRO-3 gathered gradients, momentum and updates whole on every rank, refused reduce_scatter, which is its default, and
clipped the orthogonalized update. Its partitions now hold gradients, as for every other optimizer, and one call says
where the slices lie.
""",
    ),
    Commit(
        key="stage_0",
        subject="Muon: stage 0's wrappers tell the optimizer their layout",
        body="""\
Without ZeRO every rank orthogonalized every matrix. The wrappers now say that their parameters are whole on all ranks,
so that the work is dealt out.
""",
    ),
    Commit(
        key="loss_scale",
        subject="ZeRO: unscale by the scale that the gradients carry",
        body="""\
The loss scale was updated before the gradients were divided by it, so on a step that changed the scale they were
divided by the new one. Under torch autocast with fp16 the scaler divided after clipping, and each rank skipped steps
on its own gradients alone. The gradients are now unscaled before anything reads them, all ranks skip together, and the
scale is updated once at the end of the step.
""",
    ),
    Commit(
        key="unused_gradients",
        subject="ZeRO: a parameter without a gradient has a zero one",
        body="""\
ZeRO-3, and ZeRO-1, 2 and 3 with CPU offload, keep reduced gradients in buffers from step to step and write into them
what arrives. A parameter that a step did not use was stepped with the gradient of an earlier step, which also counted
in the norm; with offload, a gradient that came in other micro-batches than the last was lost; and with NVMe offload
the gradient was what another tensor had left in the buffer. After an overflow, an unused parameter's infinite
gradient had all further steps discarded. What does not arrive is now cleared. Where every parameter has its gradient,
nothing is touched.
""",
        files=("deepspeed/runtime/zero/unused_gradients.py", ),
    ),
    Commit(
        key="nvme_offload",
        subject="ZeRO-3: NVMe offload reads the gradients that it wrote",
        body="""\
async_io ignores the results of direct I/O. A gradient was read straight to its place in the sub-group's buffer; where
that is not a multiple of the device's block, as behind a bias of 7 elements, the kernel refuses the read and the
optimizer stepped with what another tensor had left in the buffer. The part up to the next block now stays in memory,
as the part behind the last one does. A folder that cannot be written in DeepSpeed's units is refused at initialize.
A parameter that is prefetched twice in one go is read once; it ended the run.
""",
        files=("deepspeed/runtime/swap_tensor/direct_io.py", ),
    ),
    Commit(
        key="selection",
        subject="Muon: choose parameters by module, and let the user choose",
        body="""\
Parameters were chosen by name: only `embed` and `lm_head` went to Adam, so GPT-2's and T5's tables, classifier heads,
routers and Mamba's state matrices were orthogonalized. A user's own param.use_muon was overwritten, although the
engine's error tells users to set it, and a param group's own use_muon was dropped. The rules now look at the module
that owns a parameter. What the user says wins.
""",
    ),
    Commit(
        key="version",
        subject="launcher: add --version",
        body="""\
The `deepspeed` command has no way to say which DeepSpeed it belongs to: `deepspeed --version` ends with a usage error
about a missing script. It now prints the version and ends, as other commands do.
""",
    ),
    Commit(
        key="plan_command",
        subject="Muon: add ds_muon plan",
        body="""\
What Muon costs on a number of ranks could only be found out by starting them. `ds_muon plan` reads a model's config
and a ds_config, makes the plan that the optimizer would make, and prints bytes, FLOPs, balance, memory and a predicted
time for each number of ranks, beside AdamW's traffic and what DeepSpeed did before.
""",
        files=("bin/ds_muon", "deepspeed/runtime/zero/muon/cli.py", "deepspeed/runtime/zero/muon/estimate.py",
               "deepspeed/runtime/zero/muon/plan_output.py"),
    ),
    Commit(
        key="checkpoints",
        subject="Muon: universal, elastic and older checkpoints",
        body="""\
A checkpoint of Muon could not be converted, so a run could never change its number of ranks: the converter and
ZeRO-3's loader knew Adam's two states by name. They now take the states that a group has. On the way some faults go
that every optimizer had: ZeRO-3 gave all param groups the values of the first and let all sub-groups count steps in
one tensor, elastic checkpoints took the first group's states for those of all, and after a load no state could be
read or set until the next step.

What cannot be loaded is refused on all ranks before any weight is changed, and momenta that stock DeepSpeed saved as
whole matrices are cut to partitions.
""",
    ),
    Commit(
        key="extras",
        subject="fork: extras for its tests and its example",
        body="""\
Only for the fork, not for upstream: `pip install .[test]` and `pip install .[example]` bring what the fork's own test
suite and its training example need, so that the make targets install nothing by name. `[kernels]` brings optional
kernels for recent GPUs.
""",
        files=("requirements/requirements-test.txt", "requirements/requirements-example.txt",
               "requirements/requirements-kernels.txt"),
    ),
]

REPLACES = [
    Replace(
        path="deepspeed/runtime/zero/muon",
        why="One package holds all of Muon. A file of the old one left beside it would be a second implementation.",
        engine="all",
        drop_when="upstream has taken the package",
        series="package",
    ),
]
