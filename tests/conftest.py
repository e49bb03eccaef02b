# SPDX-License-Identifier: Apache-2.0
"""For all tests: hypothesis measures no time, since a busy machine would fail tests that are right."""

from hypothesis import settings

settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")
