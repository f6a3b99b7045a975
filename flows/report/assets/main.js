// Puts the page together: what is drawn first is what stands at its top.

function column(block, name) {
  return Array.from(block[name].values, (value) => (Number.isNaN(value) ? null : value))
}

async function showCurves() {
  const curves = await openBlock("curves")
  const xs = column(curves, "iteration")
  const home = find("#curves .panels")
  const filled = (one) => ({ ...one, curves: one.curves.map((curve) => ({ ...curve, values: column(curves, curve.metric) })) })
  for (const panel of curves.panels) showFigure(home, filled(panel), xs)
  for (const stacked of curves.stacks) showFigure(find(stacked.home), filled(stacked), xs, { stacked: true, wide: true })
  showScores(curves.scores)
  chooseMetric(curves, xs)
  drawNew()
}

// Scores stand at numbers of iterations trained, of which there is one more than of iterations.
function showScores({ trained, benchmarks }) {
  if (trained.length < 2) return
  const curves = benchmarks.map(({ name, values }) => ({ label: name, values, points: true }))
  showFigure(find("#evaluation .panels"), { title: "Scores", unit: "after so many iterations", curves }, trained, { wide: true })
}

// One more figure, of any metric.
function chooseMetric(curves, xs) {
  const names = Object.keys(curves.meanings)
  const home = find("#any-metric")
  home.hidden = !names.length
  if (!names.length) return
  const chosen = find("#metric")?.value
  const chooser = make("select", { id: "metric" }, ...names.map((name) => make("option", { value: name }, name)))
  if (names.includes(chosen)) chooser.value = chosen
  const place = find("#any-metric > div") ?? make("div")
  const choose = () => {
    const name = chooser.value
    const others = drawn.filter(({ element }) => element.parentNode === place && element.querySelector("h3").textContent !== name)
    for (const one of others) {
      drawn.splice(drawn.indexOf(one), 1)
      one.plot?.destroy()
      one.element.remove()
    }
    showFigure(place, { title: name, unit: "", curves: [{ label: curves.meanings[name] || name, values: column(curves, name) }] }, xs, { wide: true })
    drawNew()
  }
  chooser.addEventListener("change", choose)
  home.ontoggle = drawNew
  home.replaceChildren(home.firstElementChild, make("label", { for: "metric" }, "Metric "), chooser, place)
  choose()
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

// Commands are copied by a button; where the browser does not allow it, the command is selected.
function offerCopies() {
  document.addEventListener("click", async ({ target }) => {
    if (!target.matches("button.copy")) return
    const command = target.previousElementSibling
    try {
      await navigator.clipboard.writeText(command.textContent)
      target.textContent = "Copied"
    } catch {
      getSelection().selectAllChildren(command)
    }
  })
}

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser cannot unpack the data: use one from 2023 or later")
  followTheme()
  followWidth()
  offerCopies()
  if (document.documentElement.dataset.source) return followBoard()
  await showCurves()
  await showSamples()
}

// After all scripts.
addEventListener("DOMContentLoaded", () =>
  start().then(
    () => (document.documentElement.dataset.state = "ready"),
    (error) => {
      find("#trouble").textContent = `The page cannot be shown in full: ${error.message}`
      find("#trouble").hidden = false
      throw error
    },
  ),
)
