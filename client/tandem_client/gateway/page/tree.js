// SPDX-License-Identifier: Apache-2.0
// TreePanel: the draft tree of the round that gave a token, drawn beside the token (on a phone: at the lower edge).

import { TARGET } from "./answer.js";
import { element, shape } from "./dom.js";
import { lookOf, visible } from "./proposers.js";

const CHAR = 7.3; // width of a letter, in the drawing's units
const ROW = 32;
const GAP = 26; // between columns
const PAD = 12;
const LEAVE_MS = 250; // so long the pointer may take from the token to the panel

export class TreePanel {
  #anchor = null; // the token's element
  #stays = false; // until Escape or a click elsewhere, not only while the pointer is there
  #leaving = 0;

  constructor(panel, status) {
    this.panel = panel;
    this.status = status;
    panel.addEventListener("pointerenter", () => clearTimeout(this.#leaving));
    panel.addEventListener("pointerleave", () => this.leave());
    addEventListener("resize", () => this.#place());
    addEventListener("scroll", () => this.#place(), true);
    addEventListener("pointerdown", (event) => {
      if (!panel.contains(event.target) && !event.target.closest?.(".text .token")) this.hide();
    });
  }

  get isOpen() {
    return !this.panel.hidden;
  }

  /** Show the tree of token `n` of `answer`. */
  show(answer, n, anchor, stays) {
    clearTimeout(this.#leaving);
    if (this.#stays && !stays) return;
    this.#stays = stays;
    this.#anchor?.classList.remove("current");
    this.#anchor = anchor;
    anchor.classList.add("current");
    const token = answer.tokens[n];
    const nodes = answer.rounds.get(token.round);
    const words = describe(answer, token, nodes);
    const close = element("button", { type: "button", className: "close", ariaLabel: "Close" }, "\u00d7");
    close.addEventListener("click", () => this.hide());
    const parts = [element("div", { className: "head" }, element("h2", {}, words.title), close), element("p", {}, ...words.sentence)];
    if (nodes?.length) parts.push(element("div", { className: "drawing" }, draw(answer, token, nodes)));
    this.panel.replaceChildren(...parts);
    this.panel.hidden = false;
    if (stays) this.status.textContent = `${words.title}. ${words.plain}`;
    this.#place();
    this.panel.querySelector(".here")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** The pointer has left the token or the panel. */
  leave() {
    if (this.#stays) return;
    clearTimeout(this.#leaving);
    this.#leaving = setTimeout(() => this.hide(), LEAVE_MS);
  }

  hide() {
    clearTimeout(this.#leaving);
    this.#anchor?.classList.remove("current");
    this.#anchor = null;
    this.#stays = false;
    this.panel.hidden = true;
  }

  #place() {
    if (!this.isOpen || !this.#anchor) return;
    const { style } = this.panel;
    if (matchMedia("(max-width: 640px)").matches) {
      style.left = style.top = ""; // the style sheet puts it at the lower edge
      return;
    }
    const token = [...this.#anchor.getClientRects()].at(-1); // the last of its lines
    const { width, height } = this.panel.getBoundingClientRect();
    const below = token.bottom + 8;
    const top = below + height + 8 <= innerHeight ? below : Math.max(token.top - height - 8, 8);
    style.left = `${Math.max(8, Math.min(token.left - 24, innerWidth - width - 8))}px`;
    style.top = `${top}px`;
  }
}

/** What a token and its round were, in words. */
function describe(answer, token, nodes) {
  const quoted = `\u201c${visible(token.text)}\u201d`;
  const own = token.by === TARGET;
  const given = answer.tokens.filter(({ round }) => round === token.round).length;
  const chip = element("span", { className: `token ${lookOf(token.by)}` }, visible(token.text));
  const score = nodes?.[token.node]?.score;
  const by = own ? "the target\u2019s own choice" : `proposed by ${token.by}${score === undefined ? "" : `, which gave it ${Math.round(100 * score)} %`}`;
  const title = token.round === 0 ? "The pass over the prompt" : `Round ${token.round}`;
  const drafted = nodes ? nodes.length - 1 : null;
  const taken = nodes ? nodes.filter((node, index) => index && node.accepted).length : null;
  let round = `The round gave ${given} ${given === 1 ? "token" : "tokens"}.`;
  if (token.round === 0) round = "It gives the first token, before anything is drafted.";
  else if (drafted === 0) round = "Nothing was drafted: one pass, one token.";
  else if (drafted !== null) round = `${drafted} drafted, ${taken} accepted; the round gave ${given} ${given === 1 ? "token" : "tokens"}.`;
  else round += " Its tree was left out: the answer has too many.";
  return { title, sentence: [chip, ` is ${by}. ${round}`], plain: `${quoted} is ${by}. ${round}` };
}

/** The tree from left to right: accepted nodes filled, the others in outline, the target's own token at the end. */
function draw(answer, token, nodes) {
  const given = answer.tokens.filter(({ round }) => round === token.round);
  const own = given.find(({ node }) => node === null);
  const all = nodes.map((node, index) => ({ ...node, index, by: index ? node.drafter : "anchor" }));
  if (own) {
    const parent = all.findLast((node) => node.accepted).index;
    all.push({ text: own.text, parent, by: TARGET, accepted: true, index: all.length, isOwn: true });
  }
  layOut(all);
  const width = Math.max(...all.map((node) => node.x + node.width)) + PAD;
  const height = Math.max(...all.map((node) => node.y)) + ROW;
  const here = token.node ?? all.length - 1;
  const picture = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.setAttribute("aria-label", all.slice(1).map(sentenceOf).join("; ") || "Only the token before the round.");
  for (const node of all.slice(1)) picture.append(edge(all[node.parent], node));
  for (const node of all) picture.append(pill(node, node.index === here));
  return picture;
}

/** Columns by depth, a row a leaf, a parent in the row of its first child: the likeliest branch runs straight. */
function layOut(all) {
  const children = all.map(() => []);
  for (const node of all.slice(1)) {
    // The target's own token comes first: it is what became of the branch.
    if (node.isOwn) children[node.parent].unshift(node);
    else children[node.parent].push(node);
  }
  const widths = [];
  let row = 0;
  const visit = (node, depth) => {
    node.label = visible(node.text ?? "?", 14) || "\u2205";
    node.width = [...node.label].length * CHAR + 18;
    node.depth = depth;
    node.y = PAD / 2 + row * ROW;
    widths[depth] = Math.max(widths[depth] ?? 0, node.width);
    children[node.index].forEach((child, place) => {
      if (place) row++;
      visit(child, depth + 1);
    });
  };
  visit(all[0], 0);
  const starts = widths.map((_, depth) => PAD / 2 + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  for (const node of all) node.x = starts[node.depth];
}

function edge(parent, node) {
  const [x1, y1, x2, y2] = [parent.x + parent.width, parent.y + ROW / 2, node.x, node.y + ROW / 2];
  const bend = x2 - GAP / 2;
  return shape("path", {
    class: node.accepted ? "edge accepted" : "edge",
    d: `M${x1} ${y1} H${bend - 8} C${bend} ${y1} ${bend - 4} ${y2} ${x2} ${y2}`,
  });
}

function pill(node, isHere) {
  const looks = ["node", node.by === "anchor" ? "anchor" : lookOf(node.by), node.accepted ? "accepted" : "rejected"];
  if (isHere) looks.push("here");
  const box = { x: node.x, y: node.y + 4, width: node.width, height: ROW - 8, rx: 7 };
  const text = { x: node.x + node.width / 2, y: node.y + ROW / 2 + 4, "text-anchor": "middle" };
  return shape(
    "g",
    { class: looks.join(" ") },
    shape("title", {}, node.by === "anchor" ? "the token before the round" : sentenceOf(node)),
    shape("rect", box),
    shape("text", text, node.label),
  );
}

function sentenceOf(node) {
  const quoted = `\u201c${visible(node.text ?? "")}\u201d`;
  if (node.isOwn) return `${quoted} is the target\u2019s own`;
  return `${quoted} by ${node.drafter}, ${Math.round(100 * node.score)} %, ${node.accepted ? "accepted" : "not accepted"}`;
}
