// One sample to read: what was asked, what was answered, what became of it.

class Reader {
  constructor(samples) {
    this.samples = samples
    this.tokens = null // of all samples that have them in a report
    this.asked = new Map() // promises of tokens and turns from a board
    this.got = new Map() // those that have come, by the samples' keys
    this.row = null
    this.colouring = null
    this.turns = new Map()
    find("#sample-previous").addEventListener("click", () => samples.move(-1))
    find("#sample-next").addEventListener("click", () => samples.move(1))
  }

  offerColourings() {
    const chooser = find("#colouring")
    const offered = Array.from(chooser.options, ({ value }) => value)
    const more = this.tokens.colourings.filter(({ name }) => !offered.includes(name))
    chooser.append(...more.map(({ name, title }) => make("option", { value: name }, title)))
    if (chooser.onchange) return
    chooser.onchange = () => {
      this.colouring = COLOURINGS.find(({ name }) => name === chooser.value) ?? null
      this.read(this.row)
    }
    this.colouring = this.tokens.colourings[0] ?? null
    if (this.colouring) chooser.value = this.colouring.name
  }

  takeDetails(tokens, turns) {
    this.tokens = tokens
    for (let i = 0; i < turns.rows; i++) this.turns.set(turns.row.get(i), turns.pieces.get(i))
  }

  // Gets tokens and turns of a sample from the board, unless another one is read by then.
  async ask(row) {
    const { samples } = this
    const key = samples.key(row)
    const state = `${key} ${samples.rows.advantage.get(row)} ${samples.fate(row)}` // later steps add to what is known
    const isRead = () => this.row != null && samples.key(this.row) === key
    if (!this.asked.has(state)) {
      await new Promise((go) => setTimeout(go, 120)) // keys may run through many samples
      if (!isRead()) return
      this.asked.set(state, askDetails(samples, row))
    }
    const details = await this.asked.get(state)
    if (!details) {
      this.asked.delete(state)
      if (isRead()) find("#sample-note").textContent = "Its tokens cannot be read."
      return
    }
    if (this.got.get(key) === details && this.tokens === details.tokens) return
    this.got.set(key, details)
    for (const kept of [this.asked, this.got]) if (kept.size > 200) kept.delete(kept.keys().next().value)
    if (!isRead()) return
    this.useDetails(this.row)
    this.offerColourings()
    this.readResponse(this.row)
    this.readTurns(this.row)
    this.markWords()
  }

  // The tokens and turns that the board has sent of a sample.
  useDetails(row) {
    const details = this.got.get(this.samples.key(row))
    if (!details) return
    details.tokens.begins = new Map([[row, details.place]])
    this.turns = new Map(details.turns == null ? [] : [[row, details.turns]])
    this.tokens = details.tokens
  }

  // Turn by turn, the calls of tools folded.
  readTurns(row) {
    const pieces = this.turns.has(row) ? JSON.parse(this.turns.get(row)) : []
    const head = ({ name, facts }) => [make("strong", {}, ...visible(name)), " ", ...visible(facts)]
    const body = (text) => make("div", { class: "plain", dir: "auto" }, ...visible(text))
    const shown = pieces.map((piece) => {
      if (piece.given == null) return make("div", {}, make("p", {}, ...head(piece)), ...(piece.text == null ? [] : [body(piece.text)]))
      return make("details", {}, make("summary", {}, ...head(piece)), body(piece.given), body(piece.text))
    })
    find("#sample-turns").replaceChildren(...shown)
  }

  read(row) {
    this.row = row
    if (row == null) return
    const { samples } = this
    this.useDetails(row)
    const { rows } = samples
    const value = (name) => rows[name].get(row)
    find("#sample-title").replaceChildren(`Iteration ${value("iteration")}, group ${value("group_id")}, sample ${value("sample_index")}`)
    const age = value("age")
    const why = WHY[value("why")]
    const facts = [
      ["reward", number(value("reward"), 3)],
      ["advantage", number(value("advantage"), 3)],
      ["mean log-prob", Number.isNaN(value("log_prob")) ? null : number(value("log_prob"), 3)],
      ["tokens", value("response_tokens") < 0 ? null : `${count(value("response_tokens"))} after ${count(value("prompt_tokens"))}`],
      ["fate", samples.fate(row)],
      ["end", [value("status") === "completed" ? null : value("status"), value("finish_reason")].filter(Boolean).join(", ")],
      ["expected answer", value("label")],
      ["error", value("error")],
      ["from the environment", value("masked_tokens") > 0 ? plural(value("masked_tokens"), "token") : null],
      ["age", age > 0 ? plural(age, "publication") : null],
      ["generated in", Number.isNaN(value("seconds")) ? null : `${number(value("seconds"), 2)} s`],
      ["chosen as", why || null],
    ]
    const shown = facts.filter(([, text]) => text != null && text !== "")
    find("#sample-facts").replaceChildren(...shown.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, ...visible(text)))))
    find("#sample-prompt").replaceChildren(...visible(samples.prompt(row)))
    this.readResponse(row)
    this.readTurns(row)
    this.readGroup(row)
    this.markWords()
    if (samples.source) this.ask(row)
  }

  readResponse(row) {
    const { samples, tokens } = this
    const colouring = tokens?.colourings.includes(this.colouring) ? this.colouring : null
    const box = tokens?.response(row, colouring)
    find("#colours").replaceChildren(...(box && colouring ? [tokens.legend(colouring)] : []))
    find("#colouring-unit").textContent = box && colouring ? colouring.unit : ""
    find("#colouring").disabled = !box
    if (box) {
      followTokens(box, tokens)
      find("#sample-response").replaceChildren(box)
      find("#sample-note").textContent = ""
      return
    }
    find("#sample-response").replaceChildren(make("div", { class: "plain", dir: "auto" }, ...visible(samples.response(row))))
    const cut = samples.rows.cut != null && samples.rows.response_cut.get(row) ? " The response is longer than shown." : ""
    if (samples.source) find("#sample-note").textContent = "Reading its tokens …"
    else find("#sample-note").textContent = tokens?.samples.rows ? `Tokens are shown of ${plural(tokens.samples.rows, "sample")} of this run, not of this one.${cut}` : ""
  }

  readGroup(row) {
    const { samples } = this
    const { rows } = samples
    const group = rows.group_id.get(row)
    let first = row
    while (first > 0 && rows.group_id.get(first - 1) === group) first--
    const buttons = []
    for (let one = first; one < rows.rows && rows.group_id.get(one) === group && buttons.length < 64; one++) {
      const reward = rows.reward.get(one)
      const button = make("button", { type: "button", "aria-pressed": String(one === row), title: `sample ${rows.sample_index.get(one)}`, onclick: () => samples.goTo(one) }, number(reward, Number.isInteger(reward) ? 0 : 2))
      buttons.push(button)
    }
    find("#sample-group").replaceChildren("Rewards of the group ", ...buttons)
  }

  // Marks the words that are searched for, where the browser can without touching the text.
  markWords() {
    if (!globalThis.Highlight || !CSS.highlights) return
    CSS.highlights.delete("searched")
    const { words } = this.samples
    if (!words || this.row == null) return
    const ranges = [find("#sample-prompt"), find("#sample-response"), find("#sample-facts")].flatMap((home) => rangesOf(home, words))
    CSS.highlights.set("searched", new Highlight(...ranges))
  }
}

// Where words stand in an element's text, over the borders of its nodes.
function rangesOf(home, words) {
  const walker = document.createTreeWalker(home, NodeFilter.SHOW_TEXT)
  const nodes = []
  let text = ""
  while (walker.nextNode()) {
    nodes.push([text.length, walker.currentNode])
    text += walker.currentNode.data
  }
  const ranges = []
  const place = (at) => {
    const [begin, node] = nodes.findLast(([first]) => first <= at)
    return [node, Math.min(at - begin, node.data.length)]
  }
  const lower = text.toLowerCase()
  for (let at = lower.indexOf(words); at >= 0 && ranges.length < 200 && lower.length === text.length; at = lower.indexOf(words, at + words.length)) {
    const range = new Range()
    range.setStart(...place(at))
    range.setEnd(...place(at + words.length - 1))
    range.setEnd(range.endContainer, range.endOffset + 1)
    ranges.push(range)
  }
  return ranges
}
