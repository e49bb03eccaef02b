# SPDX-License-Identifier: Apache-2.0
"""The target model: checkpoints, configuration, weights and the decoder."""
