# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: a request's schema, regex, choice or grammar as a constraint that walks along token paths.

compile.py   from what a request says to a state at its first token; says by name what is not supported
trial.py     tries a new grammar in a process of its own first, because some take hours or crash the library
state.py     the state: which tokens may come, which ones must; forks for the nodes of a draft tree
"""

from tandem_backend.engine.grammar.compile import GrammarCompiler
from tandem_backend.engine.grammar.state import GrammarState

__all__ = ["GrammarCompiler", "GrammarState"]
