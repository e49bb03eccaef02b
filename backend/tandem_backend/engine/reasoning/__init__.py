# SPDX-License-Identifier: Apache-2.0
"""Reasoning blocks, `<think>...</think>`: told apart from the answer, and closed when they are long enough.

tags.py        the tags' tokens and how the checkpoint's template closes a block
constraint.py  the budget and the stall detector, as a constraint of the sampling hook
splitter.py    reasoning and answer of a text that comes in pieces
"""
