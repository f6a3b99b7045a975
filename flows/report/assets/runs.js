// The runs of a store: the table of all, and the curves of those that are chosen, over each other.

const CURVES_AT_ONCE = 9
const CHOSEN_AT_FIRST = 3

class Runs {
  constructor() {
    this.chosen = null // names, in the order in which they were chosen
    this.curves = new Map() // blocks of curves, by run
    this.tags = new Map()
    this.known = new Map()
    this.table = null
  }

  async take({ runs, store, priced }) {
    this.known = new Map(runs.map((run) => [run.run, run]))
    if (!this.chosen) {
      const named = location.hash.slice(1).split(",").map(decodeURIComponent)
      const given = named.filter((name) => this.known.has(name))
      const newest = [...runs].filter(({ curve }) => curve.values.length > 1).sort((a, b) => (b.last_commit_at ?? 0) - (a.last_commit_at ?? 0))
      this.chosen = given.length ? given : newest.slice(0, CHOSEN_AT_FIRST).map(({ run }) => run)
    }
    this.chosen = this.chosen.filter((name) => this.known.has(name))
    find("#no-runs").hidden = runs.length > 0
    find("#runs-table").hidden = !runs.length
    const count = { running: 0, waiting: 0, failed: 0 }
    for (const { state } of runs) if (state in count) count[state] += 1
    const parts = Object.entries(count).filter(([, n]) => n).map(([state, n]) => `${n} ${state}`)
    find("#runs-lead").textContent = [plural(runs.length, "run"), ...parts].join(", ") + ` in ${oneLine(store, 200)}`
    if (!this.table && runs.length) await this.show(priced)
    else if (this.table) await this.renew()
    await this.overlay()
  }

  data() {
    return Array.from(this.known.values(), (run) => ({
      ...run,
      reward: run.curve.values.at(-1) ?? null,
      progress: run.num_rollout ? run.iterations / run.num_rollout : 0,
      score: Object.values(run.scores)[0] ?? null,
      hours: run.device_hours,
    }))
  }

  async show(priced) {
    const node = (make) => (cell) => make(cell.getRow().getData(), cell.getValue())
    this.table = new Tabulator("#runs-table", {
      data: this.data(),
      index: "run",
      layout: "fitColumns",
      maxHeight: "min(560px, 70vh)",
      placeholder: "No run fits.",
      initialSort: [{ column: "last_commit_at", dir: "desc" }],
      columnDefaults: { headerHozAlign: "left", resizable: false, formatter: plainCell },
      columns: [
        { title: "", field: "chosen", width: 48, headerSort: false, formatter: node((run) => this.box(run)) },
        { title: "Run", field: "run", minWidth: 110, widthGrow: 2, formatter: node(runCell) },
        { title: "State", field: "state", width: 118, formatter: node((run) => (run.state ? make("span", { class: `state ${run.state}` }, run.state) : document.createTextNode("…"))) },
        { title: "Iterations", field: "progress", width: 124, formatter: node(progressCell) },
        { title: "Reward", field: "reward", width: 160, ...numeric(), formatter: node(rewardCell) },
        { title: "Score", field: "score", width: 84, ...numeric(), formatter: node(scoreCell) },
        { title: "Cost", field: "hours", width: 112, ...numeric(), formatter: node((run) => document.createTextNode(cost(run, priced))) },
        { title: "Reason", field: "reason", minWidth: 110, widthGrow: 3, formatter: node((run) => make("span", { class: "reason", title: [run.reason, run.error].filter(Boolean).join("\n") }, oneLine(run.reason))) },
        { title: "Last commit", field: "last_commit_at", width: 116, sorter: "number", formatter: node((run) => make("span", { class: "since", "data-at": run.last_commit_at ?? "" }, since(run.last_commit_at))) },
      ],
    })
    await new Promise((built) => this.table.on("tableBuilt", built))
    this.fitColumns()
    addEventListener("resize", () => this.fitColumns())
    setInterval(() => document.querySelectorAll(".since").forEach((one) => (one.textContent = since(Number(one.dataset.at) || null))), 1000)
    find("#runs-search").addEventListener("input", () => this.filter())
    find("#runs-state").addEventListener("change", () => this.filter())
    find("#runs-filters").addEventListener("submit", (event) => event.preventDefault())
    this.offerStates()
    this.filter()
  }

  // What has no room in a narrow window, or nothing to tell, has no column.
  fitColumns() {
    const rows = this.data()
    const wide = find("#runs-table").clientWidth
    const shown = { reason: rows.some(({ reason }) => reason) && wide > 900, score: rows.some(({ score }) => score != null) && wide > 760, hours: wide > 700, progress: wide > 560, last_commit_at: wide > 620, state: wide > 360 }
    for (const [field, yes] of Object.entries(shown)) this.table[yes ? "showColumn" : "hideColumn"](field)
    this.table.getColumn("reward").setWidth(wide > 560 ? 160 : 96)
    this.table.getColumn("chosen").setWidth(wide > 560 ? 48 : 40)
    this.table.redraw()
  }

  offerStates() {
    const chooser = find("#runs-state")
    const offered = new Set(Array.from(chooser.options, ({ value }) => value))
    const states = [...new Set(Array.from(this.known.values(), ({ state }) => state))].filter((state) => !offered.has(state)).sort()
    chooser.append(...states.map((state) => make("option", { value: state }, state)))
  }

  filter() {
    const words = find("#runs-search").value.trim().toLowerCase()
    const state = find("#runs-state").value
    this.table.setFilter((run) => (!state || run.state === state) && (!words || `${run.run} ${run.recipe} ${run.reason} ${run.error}`.toLowerCase().includes(words)))
    find("#runs-count").textContent = `${count(this.table.getDataCount("active"))} of ${plural(this.known.size, "run")}`
  }

  async renew() {
    await this.table.updateOrAddData(this.data())
    for (const row of this.table.getRows()) {
      if (!this.known.has(row.getData().run)) await row.delete()
      else row.reformat()
    }
    this.offerStates()
    this.fitColumns()
    this.filter()
  }

  box(run) {
    const at = this.chosen.indexOf(run.run)
    const box = make("input", { type: "checkbox", "aria-label": `curves of ${run.run}`, checked: at >= 0 })
    box.addEventListener("change", () => this.choose(run.run, box.checked))
    return make("label", { class: at >= 0 ? `pick pick-${at % COLOURS.length}` : "pick" }, box)
  }

  choose(name, yes) {
    this.chosen = this.chosen.filter((one) => one !== name)
    if (yes) this.chosen = [...this.chosen, name].slice(-CURVES_AT_ONCE)
    history.replaceState(null, "", `#${this.chosen.map(encodeURIComponent).join(",")}`)
    for (const row of this.table.getRows()) row.reformat()
    this.overlay()
  }

  // The curves of the chosen runs, a panel for each kind, a line for each run.
  async overlay() {
    const mine = (this.turn = Symbol("turn"))
    for (const name of this.chosen) {
      const { version } = this.known.get(name)
      if (this.tags.get(name) === version) continue
      const answer = await answerOf(await fetch(`/data/runs/${name}/curves`, { cache: "no-store" })).catch(() => null)
      if (!answer || mine !== this.turn) return
      receive(answer.blocks)
      this.curves.set(name, await openBlock("curves"))
      this.tags.set(name, version)
    }
    if (mine !== this.turn) return
    const home = find("#curves .panels")
    const runs = this.chosen.filter((name) => this.curves.has(name)).map((name) => ({ name, block: this.curves.get(name) }))
    find("#no-curves").hidden = runs.length > 0
    const xs = [...new Set(runs.flatMap(({ block }) => Array.from(block.iteration.values)))].sort((a, b) => a - b)
    const panels = new Map()
    for (const { block } of runs) for (const panel of block.panels) if (!panels.has(panel.title)) panels.set(panel.title, panel)
    const stale = new Set(drawn.map(({ element }) => element))
    const put = (panel, along) => {
      showFigure(home, panel, along)
      stale.delete(drawn.find((one) => one.element.parentNode === home && one.panel.title === panel.title)?.element)
    }
    for (const panel of [...panels.values()].sort((a, b) => a.order - b.order)) {
      const [{ metric, label, meaning }] = panel.curves
      const curves = runs.filter(({ block }) => block[metric]).map(({ name, block }) => ({ label: name, meaning, values: along(xs, block.iteration.values, block[metric].values), colour: this.chosen.indexOf(name) }))
      put({ ...panel, unit: [label, panel.unit].filter(Boolean).join(", "), curves }, xs)
    }
    for (const panel of scorePanels(runs, (name) => this.chosen.indexOf(name))) put(panel, panel.xs)
    for (const one of drawn.filter(({ element }) => stale.has(element))) {
      one.plot?.destroy()
      one.element.remove()
      drawn.splice(drawn.indexOf(one), 1)
    }
    drawNew()
  }
}

// Values at places of their own, on a common axis.
function along(xs, places, values) {
  const at = new Map(Array.from(places, (place, i) => [place, values[i]]))
  return xs.map((x) => (at.has(x) && !Number.isNaN(at.get(x)) ? at.get(x) : null))
}

function scorePanels(runs, colourOf) {
  const names = [...new Set(runs.flatMap(({ block }) => block.scores.benchmarks.map(({ name }) => name)))]
  return names.map((name) => {
    const scored = runs.map((run) => ({ ...run, scores: run.block.scores.benchmarks.find((one) => one.name === name) })).filter(({ scores }) => scores)
    const xs = [...new Set(scored.flatMap(({ block }) => block.scores.trained))].sort((a, b) => a - b)
    const curves = scored.map((run) => ({ label: run.name, values: along(xs, run.block.scores.trained, run.scores.values.map((value) => value ?? NaN)), points: true, colour: colourOf(run.name) }))
    return { title: `Score: ${oneLine(name, 60)}`, unit: "after so many iterations", curves, xs }
  })
}

function runCell(run) {
  const parent = run.parent ? make("small", {}, ` from ${run.parent}`) : null
  return make("a", { href: `/runs/${run.run}`, title: run.recipe }, run.run, parent)
}

function progressCell(run) {
  return make("span", { class: "progress" }, make("progress", { max: run.num_rollout || 1, value: run.iterations, "aria-hidden": "true" }), ` ${count(run.iterations)}/${count(run.num_rollout)}`)
}

function rewardCell(run) {
  const { values, name } = run.curve
  if (!values.length) return document.createTextNode("–")
  return make("span", { class: "spark", title: `${name} by iteration` }, sparkline(values), make("span", {}, name === "reward" ? number(values.at(-1), 3) : `${name} ${number(values.at(-1), 3)}`))
}

function scoreCell(run) {
  const entries = Object.entries(run.scores)
  if (!entries.length) return document.createTextNode("–")
  return make("span", { title: entries.map(([name, score]) => `${name} ${number(score, 3)}`).join("\n") }, number(entries[0][1], 3))
}

function cost(run, priced) {
  if (run.device_hours == null) return "–"
  if (priced && run.price != null) return number(run.price, 2)
  const [size, unit] = run.device_hours < 1 / 60 ? [3600, "s"] : run.device_hours < 1 ? [60, "min"] : [1, "h"]
  const spent = size * run.device_hours
  return `${number(spent, spent < 10 && unit === "h" ? 1 : 0)} ${run.device}-${unit}`
}

// A line as wide and as high as the values need.
function sparkline(values) {
  const [width, height] = [72, 18]
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag)
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value)
    return element
  }
  const [low, high] = [Math.min(...values), Math.max(...values)]
  const x = (i) => (values.length > 1 ? (i / (values.length - 1)) * (width - 4) + 2 : width / 2)
  const y = (value) => (high > low ? height - 2 - ((value - low) / (high - low)) * (height - 4) : height / 2)
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" })
  picture.append(svg("polyline", { points: values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }))
  picture.append(svg("circle", { cx: x(values.length - 1), cy: y(values.at(-1)), r: 1.8 }))
  return picture
}

const AGES = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]
function since(moment) {
  if (moment == null) return "–"
  const seconds = Math.max(0, Date.now() / 1000 - moment)
  const [size, unit] = AGES.find(([size]) => seconds >= size) ?? [1, "s"]
  return `${Math.floor(seconds / size)} ${unit} ago`
}

// Memory and work of this machine's GPUs; nothing where there is none.
function showMachine({ host, gpus }) {
  const home = find("#machine")
  home.hidden = !gpus.length
  if (!gpus.length) return
  const bar = (share, text) => make("span", { class: "gauge" }, make("progress", { max: 1, value: share, "aria-hidden": "true" }), ` ${text}`)
  const rows = gpus.map((gpu) =>
    make("li", {}, make("strong", {}, `GPU ${gpu.index}`), make("small", {}, ` ${gpu.name}`), bar(gpu.utilization, `${Math.round(100 * gpu.utilization)} % at work`), bar(gpu.used / gpu.total, `${(gpu.used / 2 ** 30).toFixed(1)} of ${(gpu.total / 2 ** 30).toFixed(0)} GiB`)),
  )
  home.replaceChildren(make("h2", {}, `GPUs of ${oneLine(host, 60)}`), make("ul", { class: "gpus" }, ...rows))
}

async function followRuns() {
  const runs = new Runs()
  const [feed, machine] = [new Feed("/data/runs"), new Feed("/data/machine")]
  await follow(async () => {
    const news = await feed.next()
    if (news) await runs.take(news)
    const state = await machine.next()
    if (state) showMachine(state)
  })
}
