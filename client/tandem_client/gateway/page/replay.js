// SPDX-License-Identifier: Apache-2.0
// Replay: two measured answers side by side on one clock, slowed down until the eye can follow.

import { element } from "./dom.js";

const SHOWN_S = 6; // how long the slower answer takes on the page, at least

/** The line below two answers: whether their texts are the same, how fast each came, and a button to see it again. */
export class Comparison {
  #frame = 0;

  constructor(on, off) {
    [this.on, this.off] = [on, off];
    this.button = element("button", { type: "button", className: "quiet" }, "Replay");
    this.button.addEventListener("click", () => (this.#frame ? this.stop() : this.play()));
    this.verdict = element("p", { className: "verdict" });
    this.clock = element("p", { className: "clock" });
    this.element = element("div", { className: "comparison" }, this.verdict, this.button, this.clock);
    this.#judge();
  }

  /** Play both; the text is there all the time, only paler until its moment has come. */
  play() {
    const views = [this.on, this.off];
    const longest = Math.max(...views.map((view) => lastSecond(view.answer)));
    if (!longest) return;
    const slower = Math.max(1, SHOWN_S / longest);
    this.button.textContent = "Show all";
    this.clock.classList.add("running");
    const begun = performance.now();
    const tick = (now) => {
      const second = (now - begun) / 1000 / slower;
      const done = views.map((view) => view.revealUntil(second));
      this.clock.textContent = `${(Math.min(second, longest) * 1000).toFixed(0)} ms, shown ${slower.toFixed(slower < 10 ? 1 : 0)} times slower`;
      if (done.every(Boolean)) this.stop();
      else this.#frame = requestAnimationFrame(tick);
    };
    this.#frame = requestAnimationFrame(tick);
  }

  stop() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    for (const view of [this.on, this.off]) view.revealUntil(Infinity);
    this.button.textContent = "Replay";
    this.clock.classList.remove("running");
  }

  /** Play at once where it went too fast to see, unless the reader wants no motion. */
  playIfFast() {
    const longest = Math.max(lastSecond(this.on.answer), lastSecond(this.off.answer));
    if (longest && longest < SHOWN_S / 2 && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.play();
  }

  #judge() {
    const [on, off] = [this.on.answer, this.off.answer];
    const isSame = on.text === off.text;
    const [fast, slow] = [on.tokensPerSecond, off.tokensPerSecond];
    const speed = fast && slow ? ` With speculation ${Math.round(fast)} tokens/s, without ${Math.round(slow)}: ${(fast / slow).toFixed(2)} times as fast.` : "";
    this.verdict.classList.toggle("error", !isSame);
    this.verdict.append(
      element("strong", {}, isSame ? "\u2713 The same text, character for character." : "\u2717 The texts differ."),
      speed,
    );
  }
}

function lastSecond(answer) {
  return answer.tokens.length ? answer.secondOf(answer.tokens.length - 1) : 0;
}
