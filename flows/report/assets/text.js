// How texts and numbers are spelled. Whatever a sample holds reaches the page as text nodes alone.

// Elements: make("td", { class: "number" }, "0.25", …). Children are nodes or texts.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else if (value === true) element.setAttribute(name, "")
    else if (value !== false && value != null) element.setAttribute(name, value)
  }
  element.append(...children.filter((child) => child != null && child !== false))
  return element
}

function find(selector) {
  return document.querySelector(selector)
}

// What cannot be seen, or would move what stands around it: control characters, marks of direction, of joining, halves
// of surrogate pairs.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu

// The text with each hidden character as a small sign that names it.
function visible(text) {
  const nodes = []
  let from = 0
  for (const found of text.matchAll(HIDDEN)) {
    nodes.push(document.createTextNode(text.slice(from, found.index)))
    nodes.push(make("span", { class: "hidden-character" }, spelled(found[0])))
    from = found.index + found[0].length
  }
  nodes.push(document.createTextNode(text.slice(from)))
  return nodes
}

function spelled(character) {
  const code = character.codePointAt(0)
  if (code < 0x20) return String.fromCodePoint(0x2400 + code)
  if (code === 0x7f) return "\u2421"
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0")
}

// One line of a text, for a cell of a table. `most` in characters.
function oneLine(text, most = 160) {
  const cut = text.length > most ? text.slice(0, most) + " …" : text
  return cut.replace(/\s+/g, " ").replace(HIDDEN, spelled)
}

const MINUS = "\u2212"

// A number with so many digits after the point, or as many as tell something.
function number(value, digits) {
  if (value == null || Number.isNaN(value)) return "–"
  if (!Number.isFinite(value)) return value > 0 ? "∞" : MINUS + "∞"
  const size = Math.abs(value)
  let text
  if (digits != null) text = size.toFixed(digits)
  else if (Number.isInteger(value) && size < 1e6) text = size.toLocaleString("en")
  else if (size >= 1e6 || (size < 1e-3 && size > 0)) text = size.toExponential(2)
  else text = size.toFixed(size >= 100 ? 1 : size >= 1 ? 2 : 4)
  return value < 0 && Number(text.replaceAll(",", "")) !== 0 ? MINUS + text : text
}

function count(value) {
  return value.toLocaleString("en")
}

function plural(n, one, many = one + "s") {
  return `${count(n)} ${n === 1 ? one : many}`
}
