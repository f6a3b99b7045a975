// The table of all samples: search, filters, order, and which one is read.

const FATES = { train: "trained", buffer: "stored for later", continue: "to be continued", drop: "dropped" }
const WHY = ["", "", "one of the best", "one of the worst", "in the middle", "drawn at random"]

let shownSamples = null

// All samples of a report, or those that a board has sent: the first time in a new table, then in the same.
async function showSamples() {
  if (!find("#samples")) return
  const rows = await openBlock("samples")
  if (!rows.rows) return
  find("#samples").classList.remove("waiting")
  if (shownSamples) return shownSamples.replace(rows)
  const samples = (shownSamples = new SampleTable(rows))
  samples.show()
  await nextTurn()
  if (!samples.source) {
    samples.reader.takeDetails(new Tokens(await openBlock("token-samples"), await openBlock("token-values")), await openBlock("turns"))
    samples.reader.offerColourings()
  }
  await samples.openTexts()
  samples.textsAreHere()
}

class SampleTable {
  constructor(rows) {
    this.source = document.documentElement.dataset.source
    this.take(rows)
    this.matching = null
    this.words = ""
    this.search = 0
    this.reader = new Reader(this)
  }

  take(rows) {
    this.rows = rows
    this.texts = { prompt: new LongText("prompts", rows.blocks.prompts), response: new LongText("responses", rows.blocks.responses) }
  }

  async openTexts() {
    await this.texts.prompt.open()
    await this.texts.response.open()
  }

  // Other rows in place of these. What is read stays; where nobody has chosen a sample, the newest is read.
  async replace(rows) {
    const key = this.reader.row == null ? null : this.key(this.reader.row)
    this.take(rows)
    await this.openTexts()
    this.reader.row = null
    this.matching = null
    await this.table.replaceData(this.data())
    this.offerChoices()
    await this.filter()
    const same = Array.from({ length: rows.rows }, (_, row) => row).find((row) => this.key(row) === key)
    if (same != null && this.held) this.goTo(same, false)
    else this.goToFirst()
  }

  // What names a sample, whichever other rows there are.
  key(row) {
    return ["iteration", "group_id", "sample_index"].map((name) => this.rows[name].get(row)).join(" ")
  }

  prompt(row) {
    return this.texts.prompt.get(this.rows.prompt.get(row))
  }

  response(row) {
    return this.texts.response.get(row)
  }

  fate(row) {
    const fate = this.rows.fate.get(row)
    const reason = this.rows.reason.get(row)
    if (fate == null) return "not decided"
    return reason ? `${FATES[fate] ?? fate}: ${reason}` : (FATES[fate] ?? fate)
  }

  data() {
    const { rows } = this
    return Array.from({ length: rows.rows }, (_, row) => {
      const value = (name) => {
        const given = rows[name].get(row)
        return Number.isNaN(given) ? null : given
      }
      return {
        row,
        iteration: value("iteration"),
        group: rows.group_id.get(row),
        reward: value("reward"),
        advantage: value("advantage"),
        tokens: value("response_tokens") < 0 ? null : value("response_tokens"),
        logProb: value("log_prob"),
        fate: this.fate(row),
        end: rows.status.get(row) === "completed" ? rows.finish_reason.get(row) : rows.status.get(row),
        shown: rows.why.get(row) > 0,
      }
    })
  }

  show() {
    this.table = new Tabulator("#sample-table", {
      data: this.data(),
      index: "row",
      initialSort: this.source ? [{ column: "iteration", dir: "desc" }] : [],
      height: "100%",
      layout: "fitColumns",
      selectableRows: 1,
      selectableRowsPersistence: false,
      headerSortTristate: true,
      placeholder: "No sample fits the search and the filters.",
      columnDefaults: { headerHozAlign: "left", resizable: false, formatter: plainCell },
      columns: [
        { title: "Iter.", field: "iteration", width: 62, ...numeric() },
        { title: "Group", field: "group", width: 66, ...numeric() },
        { title: "Reward", field: "reward", width: 70, ...numeric(3) },
        { title: "Adv.", field: "advantage", width: 62, ...numeric(2) },
        { title: "Tokens", field: "tokens", width: 68, ...numeric() },
        { title: "Log-prob", field: "logProb", width: 78, ...numeric(2) },
        { title: "Fate", field: "fate", width: 92 },
        { title: "End", field: "end", width: 78 },
        { title: "Response", field: "row", minWidth: 150, headerSort: false, formatter: (cell) => document.createTextNode(oneLine(this.response(cell.getValue()))) },
      ],
    })
    this.table.on("tableBuilt", () => {
      this.filter()
      find("#sample-table .tabulator-tableholder").setAttribute("aria-label", "Samples; arrow keys move between them")
    })
    this.table.on("rowClick", (_, row) => this.hold(row))
    this.offerChoices()
    this.offerFilters()
    this.followKeys()
  }

  textsAreHere() {
    this.table.redraw(true)
    const choice = find("#sample-search")
    choice.disabled = false
    choice.placeholder = "Search prompts, responses, labels"
    this.goToFirst()
  }

  goToFirst() {
    if (this.source) this.goTo(this.table.getRows("active")[0]?.getData().row ?? 0, false)
    else this.goTo(Math.max(0, this.rows.why.values.findIndex((why) => why > 0)))
  }

  // Chooses a sample that stays in view when others come.
  hold(row) {
    this.held = true
    this.choose(row)
  }

  choose(row) {
    this.table.deselectRow()
    row.select()
    this.chosen = row
    this.reader.read(row.getData().row)
  }

  goTo(row, scroll = true) {
    const found = this.table.getRow(row)
    if (!found) return
    this.choose(found)
    if (scroll) this.table.scrollToRow(found, "nearest", false).catch(() => undefined) // it is filtered out, and read all the same
  }

  move(by) {
    const next = by < 0 ? this.chosen?.getPrevRow() : this.chosen?.getNextRow()
    if (!next) return
    this.hold(next)
    this.table.scrollToRow(next, "nearest", false)
  }

  followKeys() {
    find("#sample-table").addEventListener(
      "keydown",
      (event) => {
        const by = { ArrowDown: 1, ArrowUp: -1 }[event.key]
        if (!by) return
        event.preventDefault()
        event.stopPropagation()
        this.move(by)
      },
      true,
    )
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return
      const act = { "/": () => find("#sample-search").focus(), j: () => this.move(1), k: () => this.move(-1) }[event.key]
      if (!act) return
      event.preventDefault()
      act()
    })
  }

  offerChoices() {
    const data = this.data()
    const offer = (id, name) => {
      const chooser = find(id)
      const known = new Set(Array.from(chooser.options, ({ value }) => value))
      const found = [...new Set(data.map((one) => one[name]))].sort()
      chooser.append(...found.filter((value) => !known.has(value)).map((value) => make("option", { value }, value)))
    }
    offer("#sample-fate", "fate")
    offer("#sample-end", "end")
  }

  offerFilters() {
    let waiting
    const later = () => {
      clearTimeout(waiting)
      waiting = setTimeout(() => this.filter(), 150)
    }
    find("#sample-filters").addEventListener("input", later)
    find("#sample-filters").addEventListener("submit", (event) => event.preventDefault())
    find("#sample-filters").addEventListener("reset", later)
  }

  async filter() {
    const turn = ++this.search
    const words = find("#sample-search").value.trim().toLowerCase()
    if (words !== this.words || !this.matching) {
      const matching = words ? await this.matches(words, () => turn === this.search) : null
      if (turn !== this.search) return
      this.words = words
      this.matching = matching
    }
    const given = (name) => {
      const text = find(name).value
      return text === "" ? null : Number(text)
    }
    const [first, last, low, high] = ["#sample-first", "#sample-last", "#sample-low", "#sample-high"].map(given)
    const [fate, end, shown] = [find("#sample-fate").value, find("#sample-end").value, find("#sample-shown").checked]
    const { matching } = this
    const fits = (one) =>
      (!matching || matching[one.row]) &&
      (first == null || one.iteration >= first) &&
      (last == null || one.iteration <= last) &&
      (low == null || (one.reward != null && one.reward >= low)) &&
      (high == null || (one.reward != null && one.reward <= high)) &&
      (!fate || one.fate === fate) &&
      (!end || one.end === end) &&
      (!shown || one.shown)
    const open = !matching && first == null && last == null && low == null && high == null && !fate && !end && !shown
    if (open) this.table.clearFilter()
    else this.table.setFilter(fits)
    const left = open ? this.rows.rows : this.table.getDataCount("active")
    find("#sample-count").textContent = open ? plural(left, "sample") : `${count(left)} of ${plural(this.rows.rows, "sample")}`
    this.reader.markWords()
  }

  // Which rows hold the words, a flag each. Lets the browser breathe; stops when `goOn` says no.
  async matches(words, goOn) {
    const { rows } = this
    const found = new Uint8Array(rows.rows)
    const prompts = new Uint8Array(rows.prompts)
    const holds = (text) => text != null && text.toLowerCase().includes(words)
    let until = performance.now() + 12
    const breathe = async () => {
      if (performance.now() < until) return
      await nextTurn()
      until = performance.now() + 12
    }
    for (let i = 0; i < rows.prompts && goOn(); i++) {
      prompts[i] = holds(this.texts.prompt.get(i))
      if (i % 64 === 0) await breathe()
    }
    for (let row = 0; row < rows.rows && goOn(); row++) {
      found[row] = prompts[rows.prompt.get(row)] || holds(rows.label.get(row)) || holds(rows.error.get(row)) || holds(this.response(row))
      if (row % 64 === 0) await breathe()
    }
    return found
  }
}

function numeric(digits) {
  return {
    hozAlign: "right",
    headerHozAlign: "right",
    sorter: "number",
    sorterParams: { alignEmptyValues: "bottom" },
    formatter: (cell) => document.createTextNode(cell.getValue() == null ? "–" : digits == null ? String(cell.getValue()) : number(cell.getValue(), digits)),
  }
}

// A text node: a cell's own formatter would take what looks like HTML for HTML.
function plainCell(cell) {
  return document.createTextNode(oneLine(String(cell.getValue() ?? "–")))
}
