// SPDX-License-Identifier: Apache-2.0
// How proposers look. Each has a colour and a line of its own, so that neither alone must tell them apart.

const KNOWN = ["target", "lookup", "mtp", "draft_model", "forced"];
const NUM_OTHERS = 3;
const others = [];

/** The class of a proposer's tokens and nodes; names that the page doesn't know get the next free look. */
export function lookOf(name) {
  if (KNOWN.includes(name)) return `by-${name}`;
  if (!others.includes(name)) others.push(name);
  return `by-other-${others.indexOf(name) % NUM_OTHERS}`;
}

/** Text with its white space and line breaks made visible, cut to `max` characters. */
export function visible(text, max = 24) {
  const marked = text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u2192").replaceAll(" ", "\u2423");
  const letters = [...marked];
  return letters.length > max ? `${letters.slice(0, max - 1).join("")}\u2026` : marked;
}
