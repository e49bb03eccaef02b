# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible gateway in front of a Triton server that runs Tandem; the extra "gateway" installs it."""
