// SPDX-License-Identifier: Apache-2.0
// AnswerView: an answer on the page, its tokens marked, walked through by keyboard or pointer, and its figures.

import { TARGET } from "./answer.js";
import { element } from "./dom.js";
import { lookOf } from "./proposers.js";

export class AnswerView {
  #spans = []; // by place in `#shown`
  #shown = []; // the tokens that have text of their own, by index into answer.tokens
  #numRead = 0; // tokens that were looked at
  #numChars = 0; // of the text, shown so far
  #numRevealed = Infinity;
  #current = -1; // the span that the arrow keys are at

  /** `title` names the answer; `tree` is the panel that shows a token's draft tree. */
  constructor(answer, title, tree) {
    this.answer = answer;
    this.tree = tree;
    this.text = element("div", { className: "text", tabIndex: 0 });
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", `${title}. Arrow keys walk through its tokens.`);
    this.text.setAttribute("aria-busy", "true");
    this.figures = element("dl", { className: "figures" });
    this.shares = element("ul", { className: "shares" });
    this.shares.setAttribute("aria-label", "Who proposed the tokens");
    this.note = element("p", { className: "note", hidden: true });
    this.heading = element("h2", {}, title);
    this.element = element("article", { className: "answer" }, this.heading, this.text, this.note, this.figures, this.shares);
    this.#listen();
  }

  /** Show what came since the last time. */
  update() {
    const { text, tokens } = this.answer;
    for (; this.#numRead < tokens.length; this.#numRead++) {
      const token = tokens[this.#numRead];
      if (token.end > text.length) break; // its text is still held back
      if (token.end > token.start) this.#append(this.#numRead, text.slice(token.start, token.end));
    }
    this.#showFigures();
  }

  /** The answer has ended: show the rest of its text too, which no token may stand for. */
  finish() {
    this.update();
    const rest = this.answer.text.slice(this.#numChars);
    if (rest) this.text.append(rest);
    if (!this.answer.text) this.text.append(element("span", { className: "empty" }, "(an empty answer)"));
    this.text.setAttribute("aria-busy", "false");
    if (this.answer.text && !this.answer.tokens.length) this.say("The server told no draft trees for this answer.");
  }

  /** A sentence below the text. */
  say(sentence, isError = false) {
    this.note.textContent = sentence;
    this.note.classList.toggle("error", isError);
    if (isError) this.note.setAttribute("role", "alert");
    this.note.hidden = false;
  }

  /** Let only the tokens before `second` (after the first one) stand out. */
  revealUntil(second) {
    let count = this.#shown.findIndex((n) => this.answer.secondOf(n) > second);
    if (count < 0) count = this.#shown.length;
    const [from, to] = [Math.min(count, this.#numRevealed), Math.max(count, Math.min(this.#numRevealed, this.#spans.length))];
    for (let at = from; at < to; at++) this.#spans[at].classList.toggle("later", at >= count);
    this.#numRevealed = count;
    return count === this.#shown.length;
  }

  #append(index, text) {
    const token = this.answer.tokens[index];
    const span = element("span", { className: `token ${lookOf(token.by)}`, tabIndex: -1 }, text);
    span.dataset.at = this.#spans.length;
    this.#spans.push(span);
    this.#shown.push(index);
    this.#numChars = token.end;
    this.text.append(span);
  }

  #showFigures() {
    const { answer } = this;
    const rate = answer.tokensPerSecond;
    const first = answer.report?.time_to_first_token_s;
    const rows = [
      ["tokens/s", rate ? Math.round(rate).toLocaleString("en") : "\u2013", "after the first token, by the server's clock"],
      ["acceptance length", answer.numRounds ? answer.acceptanceLength.toFixed(2) : "\u2013", "tokens a round; plain decoding has 1"],
      ["tokens", String(answer.numTokens), "of the answer"],
      ["rounds", String(answer.numRounds), "passes of the target after the prompt's"],
    ];
    if (first) rows.push(["first token", `${Math.round(first * 1000)} ms`, "after the request's arrival at the server"]);
    this.figures.replaceChildren(
      ...rows.map(([name, value, title]) => element("div", { title }, element("dt", {}, name), element("dd", {}, value))),
    );
    const total = answer.tokens.length || 1;
    this.shares.replaceChildren(
      ...answer.shares().map(([name, count]) => {
        const share = Math.round((100 * count) / total);
        const what = name === TARGET ? "target itself" : name;
        return element("li", { title: `${count} of ${total} tokens` }, element("span", { className: `token ${lookOf(name)}` }, what), ` ${share} %`);
      }),
    );
  }

  #listen() {
    const spanOf = (event) => event.target.closest?.(".token");
    this.text.addEventListener("pointerover", (event) => {
      const span = spanOf(event);
      if (span && event.pointerType === "mouse") this.#show(span, false);
    });
    this.text.addEventListener("pointerout", (event) => {
      if (event.pointerType === "mouse") this.tree.leave();
    });
    this.text.addEventListener("click", (event) => {
      const span = spanOf(event);
      if (span && !getSelection().toString()) {
        this.#current = Number(span.dataset.at);
        this.#show(span, true);
      }
    });
    this.text.addEventListener("keydown", (event) => this.#walk(event));
    this.text.addEventListener("focusout", (event) => {
      if (!this.text.contains(event.relatedTarget)) this.tree.hide();
    });
  }

  #walk(event) {
    const last = this.#spans.length - 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || last < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    let to = this.#current + steps[event.key];
    if (event.key === "ArrowDown" || event.key === "ArrowUp") to = this.#roundFrom(this.#current, steps[event.key]);
    this.#current = Math.min(Math.max(to, 0), last);
    const span = this.#spans[this.#current];
    span.focus({ preventScroll: true });
    span.scrollIntoView({ block: "nearest" });
    this.#show(span, true);
  }

  /** The first token of the next round, or of the one before. */
  #roundFrom(at, step) {
    if (at < 0) return 0;
    const round = (place) => this.answer.tokens[this.#shown[place]].round;
    const begin = (place) => {
      while (place > 0 && round(place - 1) === round(place)) place--;
      return place;
    };
    if (step < 0) return begin(Math.max(begin(at) - 1, 0));
    let next = at;
    while (next < this.#shown.length - 1 && round(next) === round(at)) next++;
    return next;
  }

  #show(span, stays) {
    this.tree.show(this.answer, this.#shown[Number(span.dataset.at)], span, stays);
  }
}
