// SPDX-License-Identifier: Apache-2.0
// The page: a conversation, the composer, and which way the next answer is to be made.

import { Answer } from "./answer.js";
import { AnswerView } from "./answer-view.js";
import { ApiError, chat, models } from "./api.js";
import { element } from "./dom.js";
import { Comparison } from "./replay.js";
import { TreePanel } from "./tree.js";

const $ = (id) => document.getElementById(id);
const TITLES = { on: "Speculation on", off: "Speculation off" };
const MAX_SEED = 2 ** 31;

const tree = new TreePanel($("tree"), $("status"));
let conversation = { messages: [] }; // as the API wants them; a new chat is a new object
let running = null; // the AbortController of the answer that is coming
let comparison = null;

async function loadModels() {
  try {
    const names = await models($("api-key").value);
    $("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    $("model").disabled = names.length < 2;
    return true;
  } catch (error) {
    askForKey(error);
    say(error.message);
    return false;
  }
}

/** A turn of the conversation: the question, then one answer or both. */
async function send(text) {
  if (running || !text.trim() || !isValid()) return;
  if (!$("model").value && !(await loadModels())) return showLost($("status").textContent);
  const mode = document.querySelector("input[name=speculation]:checked").value;
  const sides = mode === "both" ? ["on", "off"] : [mode];
  const turn = element("section", { className: "turn" }, element("p", { className: "question" }, text));
  const panes = element("div", { className: sides.length > 1 ? "panes two" : "panes" });
  turn.append(panes);
  $("intro").hidden = true;
  $("settings").open = false;
  comparison?.stop();
  $("conversation").append(turn);
  $("message").value = "";
  fitMessage();
  setRunning(new AbortController());
  const mine = conversation;
  const asked = [...mine.messages, { role: "user", content: text }];
  const views = sides.map((side) => new AnswerView(new Answer(), TITLES[side], tree));
  panes.append(...views.map((view) => view.element));
  turn.scrollIntoView({ block: "start" });
  try {
    const sampling = samplingFields();
    for (const [at, side] of sides.entries()) await run(views[at], side, asked, sampling);
    mine.messages = [...asked, { role: "assistant", content: views[0].answer.text }];
    if (views.length > 1) compare(turn, views);
    say(`The answer has ended: ${views[0].answer.numTokens} tokens.`);
  } catch (error) {
    failed(error, views, text);
    const begun = views[0].answer.text; // of an answer that was stopped
    if (error.name === "AbortError" && begun) mine.messages = [...asked, { role: "assistant", content: begun }];
  } finally {
    setRunning(null);
  }
}

/** Bring one answer onto the page. Both sides of a comparison run one after the other, so that each is measured alone. */
async function run(view, side, asked, sampling) {
  const body = {
    model: $("model").value,
    messages: asked,
    max_tokens: Number($("max-tokens").value),
    stream_options: { include_usage: true },
    reasoning_format: "tags", // so that the text is what the tokens are
    return_draft_trees: true,
    ...sampling,
    ...(side === "off" ? { drafter: "none" } : {}),
  };
  view.element.classList.add("running");
  let frame = 0;
  try {
    for await (const event of chat(body, $("api-key").value, running.signal)) {
      view.answer.add(event, performance.now());
      // A frame of the screen shows all that came for it.
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        following(() => view.update());
      });
    }
  } finally {
    cancelAnimationFrame(frame);
    following(() => view.finish());
    view.element.classList.remove("running");
  }
}

function compare(turn, [on, off]) {
  comparison = new Comparison(on, off);
  following(() => turn.append(comparison.element));
  comparison.playIfFast();
}

function failed(error, views, text) {
  const view = views.find(({ answer }) => !answer.finishReason) ?? views[0];
  if (error.name === "AbortError") return view.say("Stopped.");
  const isKnown = error instanceof ApiError;
  if (!isKnown) console.error(error);
  view.say(isKnown ? error.message : "The page failed; its console says why.", true);
  askForKey(error);
  $("message").value ||= text; // to be sent again
  fitMessage();
}

function askForKey(error) {
  if (error.status !== 401) return;
  $("settings").open = true;
  $("api-key").focus();
}

function showLost(reason) {
  $("conversation").append(element("p", { className: "note error", role: "alert" }, reason));
}

/** With a temperature both sides, and nobody else, draw with the same seed. */
function samplingFields() {
  const temperature = Number($("temperature").value);
  return temperature ? { temperature, seed: Math.floor(Math.random() * MAX_SEED) } : { temperature: 0 };
}

function isValid() {
  const wrong = [$("max-tokens"), $("temperature")].find((input) => !input.checkValidity());
  if (!wrong) return true;
  $("settings").open = true;
  wrong.reportValidity();
  return false;
}

/** Make a change; who was at the lower end stays there. */
function following(change) {
  const scroller = $("conversation");
  const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
  change();
  if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  if (!controller && document.activeElement === document.body) focusMessage();
}

/** Not on a touch screen: its keyboard would cover the page. */
function focusMessage() {
  if (matchMedia("(hover: hover)").matches) $("message").focus({ preventScroll: true });
}

function say(sentence) {
  $("status").textContent = sentence;
}

function fitMessage() {
  const box = $("message");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function newChat() {
  running?.abort();
  comparison?.stop();
  comparison = null;
  tree.hide();
  conversation = { messages: [] };
  $("conversation").replaceChildren($("intro"));
  $("intro").hidden = false;
  focusMessage();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("message").value);
});
$("message").addEventListener("input", fitMessage);
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("message").value);
});
$("stop").addEventListener("click", () => running?.abort());
$("new-chat").addEventListener("click", newChat);
$("examples").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") send(event.target.textContent);
});
$("api-key").addEventListener("change", loadModels);
document.querySelector(".sheet").addEventListener("submit", (event) => {
  event.preventDefault();
  $("settings").open = false;
});
$("colours").addEventListener("change", () => document.body.classList.toggle("unmarked", !$("colours").checked));
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (tree.isOpen) tree.hide();
  else if ($("settings").open) $("settings").open = false;
  else running?.abort();
});
addEventListener("pointerdown", (event) => {
  if (!$("settings").contains(event.target)) $("settings").open = false;
});

focusMessage();
loadModels();
