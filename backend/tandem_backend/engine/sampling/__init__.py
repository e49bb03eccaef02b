# SPDX-License-Identifier: Apache-2.0
"""From a row's logits to its token: one path for plain rows and for every node of a draft tree.

distribution.py   the one function: logits to distribution, in the order in which its parts apply
history.py        penalties and bans by the tokens before a row, the row's own path included
constraint.py     the hook for grammars: what may follow, by a state that walks along each path
guarded.py        keeps a constraint that raises from failing the round of all
request.py        RequestSampling: what one request asks and what it remembers between rounds
"""

from tandem_backend.engine.sampling.constraint import Constraint
from tandem_backend.engine.sampling.request import RequestSampling

__all__ = ["Constraint", "RequestSampling"]
