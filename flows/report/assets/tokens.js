// A response, token by token, coloured by what is known of each.

// One way of colouring. `of` is the value of a token; a `sequence` goes from nothing to strong, a `balance` from one
// colour over none to another, a `choice` has so few values that each has a colour.
const COLOURINGS = [
  { name: "log_prob", title: "Log-prob", unit: "nats, of the rollout engine", kind: "sequence", edges: [-0.1, -0.25, -0.5, -1, -2, -4, -8] },
  { name: "log_ratio", title: "Ratio", unit: "trainer's probability before the update over the rollout engine's", kind: "balance", asRatio: true },
  { name: "advantage", title: "Advantage", unit: "", kind: "balance" },
  { name: "value", title: "Value", unit: "of the critic", kind: "balance" },
  { name: "ref_log_ratio", title: "Against reference", unit: "probability over the reference model's", kind: "balance", asRatio: true },
  { name: "teacher_log_ratio", title: "Against teacher", unit: "probability over the teacher's", kind: "balance", asRatio: true },
  { name: "age", title: "Age", unit: "publications", kind: "age" },
  { name: "mask", title: "Mask", unit: "", kind: "mask" },
]
const STEPS_OF_COLOUR = 4

class Tokens {
  constructor(samples, values) {
    this.samples = samples
    this.values = values
    this.begins = new Map()
    let begin = 0
    for (let i = 0; i < samples.rows; i++) {
      this.begins.set(samples.row.get(i), { begin, place: i })
      begin += samples.kept.get(i)
    }
    this.colourings = COLOURINGS.filter(({ name }) => values[name])
    this.strongest = {}
    for (const { name, kind } of this.colourings) if (kind === "balance") this.strongest[name] = strongest(values[name])
  }

  has(row) {
    return this.begins.has(row)
  }

  // The response of a row, coloured; null if its tokens are not here.
  response(row, colouring) {
    const found = this.begins.get(row)
    if (!found) return null
    const { begin, place } = found
    const kept = this.samples.kept.get(place)
    const head = this.samples.head.get(place)
    const length = this.samples.length.get(place)
    const box = make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens of the response; arrow keys move between them", dir: "auto" })
    for (let i = 0; i < kept; i++) {
      if (i === head && length > kept) box.append(make("span", { class: "gap" }, ` … ${plural(length - kept, "token")} left out … `))
      const text = this.text(begin + i)
      const token = make("span", { class: "token", "data-token": begin + i, "data-position": i < head ? i : length - kept + i }, ...visibleToken(text))
      const level = this.level(colouring, begin + i)
      if (level) token.classList.add(level)
      if (!text) token.classList.add("part")
      box.append(token)
      if (text.includes("\n")) box.append(make("br"))
    }
    if (!kept) box.append(make("span", { class: "none" }, "no tokens"))
    return box
  }

  text(at) {
    return this.values.text ? this.values.text.get(at) : `#${this.values.id.get(at)} `
  }

  // The class of a token's colour, or nothing.
  level(colouring, at) {
    if (!colouring) return ""
    const value = this.values[colouring.name].get(at)
    if (Number.isNaN(value)) return ""
    if (colouring.kind === "mask") return value ? "" : "masked"
    if (colouring.kind === "age") return value > 0 ? `sequence-${Math.min(7, value)}` : ""
    if (colouring.kind === "sequence") {
      const level = colouring.edges.filter((edge) => value < edge).length
      return level ? `sequence-${level}` : ""
    }
    const level = Math.round((value / this.strongest[colouring.name]) * STEPS_OF_COLOUR)
    const held = Math.max(-STEPS_OF_COLOUR, Math.min(STEPS_OF_COLOUR, level))
    return held ? `balance-${held < 0 ? "below" : "above"}-${Math.abs(held)}` : ""
  }

  // What the colours mean.
  legend(colouring) {
    const chip = (style, text) => make("li", {}, make("span", { class: `chip ${style}` }), text)
    const items = []
    if (colouring.kind === "sequence") {
      const say = (edge) => MINUS + Math.abs(edge)
      items.push(chip("", `over ${say(colouring.edges[0])}`))
      colouring.edges.forEach((edge, i) => items.push(chip(`sequence-${i + 1}`, `${i ? "" : "under "}${say(edge)}`)))
    } else if (colouring.kind === "age") {
      items.push(chip("", "0"), ...[1, 2, 3, 4, 5, 6].map((age) => chip(`sequence-${age}`, String(age))), chip("sequence-7", "7 and more"))
    } else if (colouring.kind === "mask") {
      items.push(chip("", "trained on"), chip("masked", "not trained on"))
    } else {
      const most = this.strongest[colouring.name]
      const say = (value) => (colouring.asRatio ? `×${number(Math.exp(value), Math.abs(value) < 0.1 ? 4 : 2)}` : number(value))
      for (let level = -STEPS_OF_COLOUR; level <= STEPS_OF_COLOUR; level++) {
        const style = level ? `balance-${level < 0 ? "below" : "above"}-${Math.abs(level)}` : ""
        items.push(chip(style, level % 2 ? "" : say((most * level) / STEPS_OF_COLOUR)))
      }
    }
    return make("ul", { class: "colours", "aria-label": `Colours: ${colouring.title}` }, ...items)
  }

  // All that is known of a token, as [name, text] pairs.
  facts(at, position) {
    const value = (name) => this.values[name]?.get(at)
    const ratio = (name) => (this.values[name] && !Number.isNaN(value(name)) ? number(Math.exp(value(name)), 4) : null)
    const plain = (name, digits) => (this.values[name] && !Number.isNaN(value(name)) ? number(value(name), digits) : null)
    return [
      ["token", `${position}, id ${value("id")}`],
      ["log-prob", plain("log_prob", 3)],
      ["probability", this.values.log_prob && !Number.isNaN(value("log_prob")) ? number(Math.exp(value("log_prob")), 4) : null],
      ["ratio", ratio("log_ratio")],
      ["against reference", ratio("ref_log_ratio")],
      ["against teacher", ratio("teacher_log_ratio")],
      ["advantage", plain("advantage", 3)],
      ["return", plain("return", 3)],
      ["value", plain("value", 3)],
      ["age", value("age") >= 0 ? plain("age") : null],
      ["weight version", plain("version")],
      ["loss mask", plain("mask")],
    ].filter(([, text]) => text != null)
  }
}

// The size that all but one in fifty tokens stay below: one outlier must not make all others pale.
function strongest(values) {
  const step = Math.max(1, Math.floor(values.length / 20000))
  const sizes = []
  for (let i = 0; i < values.length; i += step) {
    const size = Math.abs(values.get(i))
    if (size > 0) sizes.push(size)
  }
  sizes.sort((a, b) => a - b)
  return sizes[Math.floor(sizes.length * 0.98)] || 1
}

function visibleToken(text) {
  return visible(text.replaceAll("\n", "↵").replaceAll("\t", "⇥"))
}

// The values of the token under the mouse, or of the one that the arrow keys have come to.
function followTokens(box, tokens) {
  const card = find("#token-card")
  let active = null
  const show = (token) => {
    active?.classList.remove("active")
    active = token
    if (!token) return (card.hidden = true)
    token.classList.add("active")
    const facts = tokens.facts(Number(token.dataset.token), Number(token.dataset.position))
    card.replaceChildren(...facts.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))))
    card.hidden = false
    const place = token.getBoundingClientRect()
    const left = Math.max(8, Math.min(place.left, innerWidth - card.offsetWidth - 8))
    const below = place.bottom + 6 + card.offsetHeight < innerHeight
    card.style.left = `${left}px`
    card.style.top = `${below ? place.bottom + 6 : Math.max(8, place.top - 6 - card.offsetHeight)}px`
  }
  box.addEventListener("mouseover", (event) => show(event.target.closest(".token")))
  box.addEventListener("mouseleave", () => show(null))
  box.addEventListener("blur", () => show(null))
  box.addEventListener("keydown", (event) => {
    const all = box.querySelectorAll(".token")
    const at = active ? Array.prototype.indexOf.call(all, active) : -1
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key]
    if (to == null || !all.length) return
    event.preventDefault()
    event.stopPropagation()
    show(all[Math.max(0, Math.min(all.length - 1, to))])
    active.scrollIntoView({ block: "nearest" })
  })
}
