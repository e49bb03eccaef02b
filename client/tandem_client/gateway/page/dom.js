// SPDX-License-Identifier: Apache-2.0
// Elements without markup: all text goes in as text, so that nothing a model writes can become part of the page.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties and children; strings are text. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** An SVG element with attributes and children. */
export function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
