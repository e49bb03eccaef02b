# SPDX-License-Identifier: Apache-2.0
"""What `tandem verify` does: decode plainly, decode in every other way, compare tokens and bits."""
