// SPDX-License-Identifier: Apache-2.0
// Answer: what one request has brought so far. No DOM in here.

export const TARGET = "target";

/** Text, its tokens with who proposed them, and the draft trees of the rounds. */
export class Answer {
  text = "";
  tokens = []; // {text, by, round, node, start, end}; start and end are places in `text`
  rounds = new Map(); // round -> nodes, null where the server left them out
  report = null; // the gateway's `tandem` object of the end: figures by the server's clock
  usage = null;
  finishReason = null;
  #end = 0; // of the last token
  #firstMs = null;
  #lastMs = null;

  /** Take an event of the stream. */
  add(event, nowMs) {
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices ?? []) {
      this.text += choice.delta?.content ?? "";
      const trees = choice.tandem?.draft_trees;
      if (trees) this.#addTrees(trees);
      if (choice.delta?.content) {
        this.#firstMs ??= nowMs;
        this.#lastMs = nowMs;
      }
      if (choice.finish_reason) {
        this.finishReason = choice.finish_reason;
        this.report = choice.tandem ?? null;
      }
    }
  }

  #addTrees({ tokens, rounds }) {
    for (const { round, nodes } of rounds) this.rounds.set(round, nodes);
    for (const { text, round, drafter, node } of tokens) {
      const start = this.#end;
      this.#end += (text ?? "").length;
      this.tokens.push({ text: text ?? "", by: drafter ?? TARGET, round, node, start, end: this.#end });
    }
  }

  /** Decoding rounds so far; the pass over the prompt is not one. */
  get numRounds() {
    return Math.max(0, ...this.rounds.keys());
  }

  /** Tokens a decoding round: the server's figure once the answer has ended. */
  get acceptanceLength() {
    if (this.report?.acceptance_len !== undefined) return this.report.acceptance_len;
    return this.numRounds ? (this.tokens.length - 1) / this.numRounds : 0;
  }

  /** Tokens a second after the first: by the server's clock once the answer has ended, else by this page's. */
  get tokensPerSecond() {
    if (this.report) return this.report.decode_tokens_per_s ?? null;
    const elapsedMs = this.#lastMs - this.#firstMs;
    return elapsedMs > 0 ? ((this.tokens.length - 1) * 1000) / elapsedMs : null;
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? this.tokens.length;
  }

  /** How many tokens each proposer brought, the most first. */
  shares() {
    const counts = new Map();
    for (const { by } of this.tokens) counts.set(by, (counts.get(by) ?? 0) + 1);
    return [...counts].sort((a, b) => b[1] - a[1]);
  }

  /**
   * Seconds after the first token at which token `n` came. Only the whole decoding time is measured, and a round costs
   * about the same as another, so each gets an equal part of it.
   */
  secondOf(n) {
    if (!this.tokensPerSecond || !this.numRounds) return 0;
    const wholeS = (this.tokens.length - 1) / this.tokensPerSecond;
    return (wholeS * this.tokens[n].round) / this.numRounds;
  }
}
