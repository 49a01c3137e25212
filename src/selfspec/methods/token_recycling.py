"""Token recycling: stores the target's likeliest tokens after each token in a matrix, and drafts trees from it."""

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from selfspec.decoding.draft import Draft, NoDraft, TokenDraft
from selfspec.decoding.drafter import Continuation, Drafter, Feedback, Needs, Prefill
from selfspec.errors import InvalidSettingError, StateError
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting
from selfspec.methods.state import LearnedState
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import ROOT, TokenTree

_UNKNOWN = -1
"""In the matrix: no candidate yet. As an index: the matrix's last row, which never has candidates."""


@dataclass(frozen=True)
class TokenRecyclingSettings(MethodSettings):
    """Settings of ``token-recycling``."""

    candidates: int = setting(8, "candidates stored for each token of the vocabulary, k", minimum=1, maximum=64)
    tree_size: int = setting(80, "nodes of the draft tree", minimum=1, maximum=512)
    tree_depth: int = setting(6, "levels of the draft tree", minimum=1, maximum=32)
    prompt_rows: int = setting(64, "last prompt tokens whose candidates are stored before the first round", minimum=0)


@dataclass(frozen=True)
class Template:
    """The draft tree, level by level, and each node's rank among the candidates of its parent, from 0."""

    tree: TokenTree
    ranks: tuple[int, ...]


def hit_rate(rank: int) -> float:
    """The probability that the candidate of a rank is the next token, if its parent is right: 0.55 / (rank + 1)².

    An approximation of what was measured on the bundled checkpoint (nine prompts, 855 tokens): ranks from 0 on were
    right in 58, 10, 4, 3, 2, 1 … percent of the cases.
    """
    return 0.55 / (rank + 1) ** 2


def best_template(size: int, candidates: int, depth: int) -> Template:
    """The tree with most expected accepted tokens, if candidates are right independently with ``hit_rate``.

    A node is accepted with the product of the hit rates of its path, and the expected length is the sum of that over
    all nodes. No node is likelier than its parent or the sibling of lower rank, so the ``size`` likeliest nodes are a
    tree.
    """
    chosen: list[tuple[int, ...]] = []
    # Heap of paths of ranks from the root, the likeliest first.
    frontier: list[tuple[float, tuple[int, ...]]] = [(-hit_rate(0), (0,))]
    while frontier and len(chosen) < size:
        likelihood, path = heapq.heappop(frontier)
        chosen.append(path)
        if len(path) < depth:
            heapq.heappush(frontier, (likelihood * hit_rate(0), (*path, 0)))
        if path[-1] + 1 < candidates:
            sibling = likelihood / hit_rate(path[-1]) * hit_rate(path[-1] + 1)
            heapq.heappush(frontier, (sibling, (*path[:-1], path[-1] + 1)))
    chosen.sort(key=lambda path: (len(path), path))
    node_of = {path: node for node, path in enumerate(chosen)} | {(): ROOT}
    return Template(TokenTree(tuple(node_of[path[:-1]] for path in chosen)), tuple(path[-1] for path in chosen))


class SuccessorTable:
    """The adjacency matrix: for each token the ``k`` likeliest next tokens when the target last ran over it.

    All requests share it, from several threads.
    """

    def __init__(self, vocab_size: int, count: int, device: torch.device) -> None:
        self._matrix = torch.full((vocab_size + 1, count), _UNKNOWN, dtype=torch.int32, device=device)
        self._lock = threading.Lock()

    def note(self, token_ids: torch.Tensor, scores: torch.Tensor, priority: torch.Tensor) -> None:
        """Replaces the candidates of tokens ``[rows]`` by the target's ``scores``, ``[rows, vocab]``, after each.

        Tokens of ``-inf`` are no candidates. Of several rows of a token, the one of highest ``priority``, long
        ``[rows]``, all different, counts.
        """
        best = scores.topk(self._matrix.shape[1])
        found = best.indices.int().masked_fill_(best.values == -torch.inf, _UNKNOWN)
        # With repeated indices it is undefined which row a scatter writes, so all rows of a token get the same values.
        same_token = (token_ids[:, None] == token_ids) * (priority + 1)
        found = found[same_token.argmax(-1)]
        with self._lock:
            self._matrix[token_ids] = found

    def fill(self, token: int, levels: "list[tuple[torch.Tensor, torch.Tensor]]") -> list[int]:
        """The tokens of a tree below ``token``, with one gather a level and one copy to the host.

        A level is two long tensors ``[nodes]``: each node's parent in the level above, and its rank.
        """
        tokens = torch.full((1,), token, dtype=torch.int32, device=self._matrix.device)
        filled = []
        with self._lock:
            for parents, ranks in levels:
                tokens = self._matrix[tokens[parents], ranks]
                filled.append(tokens)
        found: list[int] = torch.cat(filled).tolist()
        return found

    def copy(self) -> torch.Tensor:
        """The matrix, int32 ``[vocab, k]``."""
        with self._lock:
            return self._matrix[:-1].clone()

    def replace(self, matrix: torch.Tensor | None) -> None:
        """Replaces the matrix.

        Args:
            matrix: int32 ``[vocab, k]``.

        Raises:
            StateError: it does not fit.
        """
        checked = _checked(matrix, self._matrix.shape[0] - 1, self._matrix.shape[1])
        with self._lock:
            self._matrix[:-1] = checked.to(self._matrix.device)


def _checked(matrix: torch.Tensor | None, vocab_size: int, count: int) -> torch.Tensor:
    wanted = f"an int32 matrix of {vocab_size} tokens by {count} candidates"
    if matrix is None or matrix.dtype != torch.int32 or list(matrix.shape) != [vocab_size, count]:
        found = "nothing" if matrix is None else f"{matrix.dtype} {list(matrix.shape)}"
        raise StateError(
            f"token-recycling needs {wanted}, the state has {found}; set candidates as it was, or start without it"
        )
    if bool(((matrix < _UNKNOWN) | (matrix >= vocab_size)).any()):
        raise StateError(f"the state is damaged: token-recycling needs {wanted}, all of them token ids; delete it")
    ordered = matrix.sort(dim=-1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != _UNKNOWN)).any()):
        raise StateError("the state is damaged: a token has the same candidate twice; delete it")
    return matrix


@register
class TokenRecycling(Method):
    """Drafts a tree of fixed shape, filled level by level with each token's candidates (Luo et al. 2024, section 3).

    The matrix starts empty and is kept over the requests of a stream. Every verified row updates the candidates of its
    token, rejected rows too. Parts of the tree for which the matrix has no candidates yet are left out.

    Known differences from the authors' code: where a token is in several rows, accepted rows count first, then later
    ones (there the order is undefined). The shape of the tree is ``best_template``, not the authors' list. The last
    prompt tokens fill the matrix before the first round.
    """

    name = "token-recycling"
    summary = "a tree of the target's last likeliest tokens after each token"
    source = "token recycling (Luo et al. 2024)"
    Settings = TokenRecyclingSettings
    settings: TokenRecyclingSettings
    learns = True

    def __init__(self, target: Target, settings: TokenRecyclingSettings) -> None:
        super().__init__(target, settings)
        if settings.candidates > target.vocab_size:
            raise InvalidSettingError(
                f"candidates {settings.candidates} is more than the {target.vocab_size} tokens of this model; lower it"
            )
        self.template = best_template(settings.tree_size, settings.candidates, settings.tree_depth)
        self.candidates = SuccessorTable(target.vocab_size, settings.candidates, target.device)
        self.levels = _levels(self.template, target.device)
        self.chain_levels = _levels(best_template(settings.tree_depth, 1, settings.tree_depth), target.device)

    @property
    def needs(self) -> Needs:
        """Cache slots for the tree, and the hidden states that give the prompt's candidates."""
        tree, rows = self.template.tree, self.settings.prompt_rows
        states = frozenset({self.target.sublayer_count} if rows else ())
        return Needs(sibling_rows=len(tree) - max(tree.depths), prompt_rows=rows, prompt_states=states)

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        for hidden_states in prefill.hidden_states.values():
            rows = len(hidden_states)
            token_ids = torch.tensor(prefill.prompt_ids[-rows:], device=hidden_states.device)
            order = torch.arange(rows, device=hidden_states.device)
            self.candidates.note(token_ids, self.target.logits(hidden_states).float(), order)
        return _TokenRecycling(self, prefill.first_token)

    def state(self) -> LearnedState:
        """The matrix."""
        return LearnedState(tensors={"candidates": self.candidates.copy()})

    def restore(self, state: LearnedState) -> None:
        """Loads a matrix."""
        self.candidates.replace(state.tensors.get("candidates"))


def _levels(template: Template, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each level the nodes' parents, as indices into the level above, and their ranks."""
    depths = template.tree.depths[1:]
    starts = [depths.index(depth) for depth in range(1, max(depths) + 1)] + [len(depths)]
    levels, above = [], ROOT
    for start, end in pairwise(starts):
        parents = [parent - above for parent in template.tree.parents[start:end]]
        ranks = template.ranks[start:end]
        levels.append((torch.tensor(parents, device=device), torch.tensor(ranks, device=device)))
        above = start
    return levels


class _TokenRecycling(Drafter):
    def __init__(self, method: TokenRecycling, first_token: int) -> None:
        self._method = method
        self._pending = first_token

    def plan(self) -> Draft:
        """Fills the tree with candidates of the pending token; nodes without a candidate are left out."""
        tokens = self._method.candidates.fill(self._pending, self._method.levels)
        draft = TokenDraft(tuple(tokens), self._method.template.tree)
        if _UNKNOWN not in tokens:
            return draft
        known = [node for node, token in enumerate(tokens) if token != _UNKNOWN]
        return draft.only(known) if known else NoDraft()

    def continue_after(self, drafted: Sequence[int]) -> Continuation:
        """The likeliest token, the likeliest after that, and so on."""
        last = drafted[-1] if drafted else self._pending
        tokens = self._method.candidates.fill(last, self._method.chain_levels)
        known = tokens.index(_UNKNOWN) if _UNKNOWN in tokens else len(tokens)
        return Continuation(tuple(tokens[:known]), match_length=1 if known else 0)

    def learn(self, feedback: Feedback) -> None:
        """Notes each verified token's likeliest successors; those after accepted tokens take precedence."""
        drafted, scores = feedback.proposal.token_ids, feedback.target_scores
        token_ids = torch.cat([drafted.new_tensor([self._pending]), drafted])
        priority = torch.arange(len(token_ids), device=drafted.device)
        priority[list(feedback.acceptance.rows)] += len(token_ids)
        self._method.candidates.note(token_ids, scores, priority)
        self._pending = feedback.acceptance.next_token

    observe = learn
