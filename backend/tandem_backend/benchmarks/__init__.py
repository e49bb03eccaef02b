# SPDX-License-Identifier: Apache-2.0
"""What `tandem bench` measures. Figures only: exactness is the business of `tandem verify`."""
