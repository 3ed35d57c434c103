# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Upstream functions that our files rely on without an edit in them, and what they rely on.

seams.lock holds a digest of each, so that a release that changes one stops the build until someone has looked.
"""

LEANS_ON = {
    "deepspeed/__init__.py": {
        "set_optimizer_flags": "sets param.muon_num_heads; reads the key per_head_muon",
    },
    "deepspeed/runtime/bf16_optimizer.py": {
        "BF16_Optimizer._flatten_dense_tensors_aligned": "parameters stand in the flat buffer without gaps",
    },
    "deepspeed/runtime/zero/stage_1_and_2.py": {
        "DeepSpeedZeroOptimizer._update_model_bit16_weights": "round_robin_bit16_offsets are where parameters lie",
        "DeepSpeedZeroOptimizer.get_data_parallel_partitions": "all partitions of a group have the same size",
    },
    "deepspeed/runtime/zero/stage3.py": {
        "DeepSpeedZeroOptimizer_Stage3.set_grad_positions": "grad_position is where a shard lies in its partition",
        "DeepSpeedZeroOptimizer_Stage3._get_sub_group_process_group": "the group over which a sub-group is cut",
    },
    "deepspeed/runtime/engine.py": {
        "DeepSpeedEngine.get_optimizer_configuration": "the keys for the auxiliary Adam that options.py lists",
        "DeepSpeedEngine._muon_half_defaults": "reads muon_lr and adam_lr, which options.py lists",
        "DeepSpeedEngine._muon_param_groups": "the keys that a param group may set, which options.py lists",
    },
}
