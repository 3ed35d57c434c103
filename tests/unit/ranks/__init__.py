# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks that start once and stay: the processes behind ``unit.common.DistributedTest``.

messages   what pytest's process and a rank say to each other
pool       pytest's side: starts the ranks, hands out a test, collects the outcomes, replaces what died or hung
handle     pytest's side: one rank
report     pytest's side: turns the outcomes of all ranks into one pass, skip or failure
process    a rank's side: the loop that runs tests
group      a rank's side: the process group of a test
isolation  a rank's side: what a test may change, and how it is put back
modules    a rank's side: finds the test's module
plugin     the hooks that make pytest use all this
"""
