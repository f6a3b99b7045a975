// Puts the page together: what is drawn first is what stands at its top.

const STEPS = ["rollout", "reward", "filter", "score", "advantage", "train", "checkpoint", "sync", "eval"]

function column(block, name) {
  return Array.from(block[name].values, (value) => (Number.isNaN(value) ? null : value))
}

async function showCurves() {
  const curves = await openBlock("curves")
  const xs = column(curves, "iteration")
  const home = find("#curves .panels")
  for (const panel of curves.panels) {
    home.append(figure({ ...panel, curves: panel.curves.map((one) => ({ ...one, values: column(curves, one.metric) })) }, xs))
  }
  for (const stacked of curves.stacks) {
    const parts = stacked.curves.map((one) => ({ ...one, values: column(curves, one.metric) }))
    find(stacked.home)?.append(figure({ ...stacked, curves: parts }, xs, { stacked: true, wide: true }))
  }
  showScores(curves.scores)
  chooseMetric(curves, xs)
  drawAll()
}

// Scores stand at numbers of iterations trained, of which there is one more than of iterations.
function showScores({ trained, benchmarks }) {
  if (trained.length < 2) return
  const curves = benchmarks.map(({ name, values }) => ({ label: name, values, points: true }))
  find("#evaluation .panels").append(figure({ title: "Scores", unit: "after so many iterations", curves }, trained, { wide: true }))
}

// One more figure, of any metric.
function chooseMetric(curves, xs) {
  const names = Object.keys(curves.meanings)
  const home = find("#any-metric")
  if (!names.length) return
  const chooser = make("select", { id: "metric" }, ...names.map((name) => make("option", { value: name }, name)))
  const place = make("div")
  const show = () => {
    const name = chooser.value
    const index = drawn.findIndex(({ panel }) => panel.any)
    if (index >= 0) drawn.splice(index, 1)[0].plot?.destroy()
    const panel = { title: name, unit: "", any: true, curves: [{ label: curves.meanings[name] || name, values: column(curves, name) }] }
    place.replaceChildren(figure(panel, xs, { wide: true }))
    const one = drawn.at(-1)
    if (home.open) draw(one, one.frame.clientWidth)
  }
  chooser.addEventListener("change", show)
  home.addEventListener("toggle", () => drawn.filter(({ panel }) => panel.any).forEach((one) => draw(one, one.frame.clientWidth)))
  home.append(make("label", { for: "metric" }, "Metric "), chooser, place)
  show()
}

function followTheme() {
  const root = document.documentElement
  const button = find("#theme")
  const dark = matchMedia("(prefers-color-scheme: dark)")
  const name = () => root.dataset.theme ?? (dark.matches ? "dark" : "light")
  const label = () => (button.textContent = name() === "dark" ? "Light" : "Dark")
  button.addEventListener("click", () => {
    root.dataset.theme = name() === "dark" ? "light" : "dark"
    label()
    drawAll()
  })
  dark.addEventListener("change", () => {
    label()
    drawAll()
  })
  label()
}

function followWidth() {
  let width = innerWidth
  let waiting
  addEventListener("resize", () => {
    if (innerWidth === width) return
    width = innerWidth
    clearTimeout(waiting)
    waiting = setTimeout(drawAll, 100)
  })
  // Paper has a width of its own.
  matchMedia("print").addEventListener("change", drawAll)
}

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser cannot unpack the data: use one from 2023 or later")
  followTheme()
  followWidth()
  await showCurves()
  await showSamples()
}

start().then(
  () => (document.documentElement.dataset.state = "ready"),
  (error) => {
    find("#trouble").textContent = `The report cannot be shown in full: ${error.message}`
    find("#trouble").hidden = false
    throw error
  },
)
