# SPDX-License-Identifier: Apache-2.0
"""Drafters, one module each, behind the interface of `base`."""
