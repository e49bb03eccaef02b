# SPDX-License-Identifier: Apache-2.0
"""Caches of the engine: states of prefixes and whole responses. They restore bytes, never an approximation."""
