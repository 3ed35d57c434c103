# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Muon on whole matrices under every ZeRO engine."""
