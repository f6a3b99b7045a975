// Curves over the iterations, and stacks of what an iteration was made of. Drawn by uPlot, read by mouse, keys and
// screen readers.

const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6", "--series-7", "--series-8", "--series-9"]
const HEIGHT = 180
const drawn = []
let pointed = null // the iteration that was last pointed at

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim()
}

// A figure: { title, unit, log, curves: [{ label, meaning, values, points, colour }] } over `xs`.
function figure(panel, xs, { stacked = false, wide = false } = {}) {
  const legend = make("ul", { class: "legend" })
  const frame = make("div", { class: "frame", tabindex: "0", role: "img" })
  const element = make(
    "figure",
    { class: wide ? "panel wide" : "panel" },
    make("figcaption", {}, make("h3", {}, panel.title), make("span", { class: "unit" }, panel.unit)),
    frame,
    legend,
  )
  const readings = panel.curves.map((curve, i) => {
    const value = make("output", { class: "number" })
    const key = make("span", { class: `key series-${(curve.colour ?? i) % COLOURS.length}${curve.points ? " points" : ""}` })
    legend.append(make("li", { title: curve.meaning || null }, key, curve.label, value))
    return value
  })
  const at = make("li", { class: "at" })
  legend.prepend(at)
  const one = { panel, xs, frame, stacked, element, plot: null }
  one.read = (place) => {
    const { panel, xs } = one
    const whole = place != null || panel.curves.every(({ values }) => values.at(-1) != null)
    at.textContent = !xs.length ? "" : whole ? `iteration ${xs[place ?? xs.length - 1]}` : "newest values"
    panel.curves.forEach((curve, i) => {
      const given = place == null ? curve.values.findLast((value) => value != null) : curve.values[place]
      readings[i].textContent = number(given)
    })
    if (place != null) pointed = xs[place]
  }
  fill(one, panel, xs)
  drawn.push(one)
  return element
}

// Puts other values of the same curves into a figure.
function fill(one, panel, xs) {
  Object.assign(one, { panel, xs })
  one.frame.setAttribute("aria-label", summary(panel, xs))
  one.read(null)
}

// A figure at a place of the page: that of these curves with new values, or a new one.
function showFigure(home, panel, xs, options) {
  const names = (given) => [given.title, given.unit, ...given.curves.map(({ label }) => label)].join("\n")
  const at = drawn.findIndex((one) => one.element.parentNode === home && one.panel.title === panel.title)
  const one = drawn[at]
  if (one && names(one.panel) === names(panel)) {
    const before = one.xs
    fill(one, panel, xs)
    if (before.length < 4 || !one.plot) return draw(one, one.frame.clientWidth)
    const { min, max } = one.plot.scales.x
    const zoomed = min > before[0] || max < before.at(-1)
    return one.plot.setData(columnsOf(one), !zoomed)
  }
  const element = figure(panel, xs, options)
  if (!one) return home.append(element)
  one.plot?.destroy()
  one.element.replaceWith(element)
  drawn.splice(at, 1)
  draw(drawn.at(-1), drawn.at(-1).frame.clientWidth)
}

function summary(panel, xs) {
  const ends = panel.curves.map(({ label, values }) => {
    const known = values.filter((value) => value != null)
    return known.length ? `${label} from ${number(known[0])} to ${number(known.at(-1))}` : `${label}: nothing`
  })
  return `${panel.title}${panel.unit ? `, ${panel.unit}` : ""}, of ${plural(xs.length, "iteration")}: ${ends.join("; ")}`
}

// Draw, or draw again, all figures: when the page is there, and when its colours or its width change.
function drawAll() {
  const widths = drawn.map(({ frame }) => frame.clientWidth)
  drawn.forEach((one, i) => draw(one, widths[i]))
}

// Draws the figures that have no picture yet.
function drawNew() {
  for (const one of drawn) if (!one.plot) draw(one, one.frame.clientWidth)
}

function draw(one, width) {
  one.plot?.destroy()
  one.plot = null
  if (!one.xs.length || !width) return
  const { panel, xs, stacked } = one
  const order = orderOf(one)
  const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } }
  const grid = { stroke: colour("--line"), width: 1 }
  const lone = xs.length === 1
  one.plot = new uPlot(
    {
      width,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: { sync: { key: "iterations" }, y: false, drag: { x: true, y: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: (_, low, high) => (lone ? [xs[0] - 1, xs[0] + 1] : stacked ? [low - 0.6, high + 0.6] : [low, high]) },
        y: panel.log ? { distr: 3 } : { range: (_, low, high) => limits(low, high, stacked) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
        { ...axis, grid, size: 52, gap: 4, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : tickText(tick))) },
      ],
      series: [
        {},
        ...order.map((i) => {
          const stroke = colour(COLOURS[(panel.curves[i].colour ?? i) % COLOURS.length])
          if (stacked) return { stroke, fill: stroke, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.84, 40], gap: 0 }) }
          const dots = panel.curves[i].points || lone
          return { stroke, width: 1.75, spanGaps: true, dash: dots && !lone ? [4, 4] : undefined, points: { show: dots || xs.length < 4, size: 7, fill: stroke } }
        }),
      ],
      hooks: { setCursor: [(plot) => one.read(plot.cursor.idx)] },
    },
    columnsOf(one),
    one.frame,
  )
  one.frame.onkeydown = (event) => step(event, one)
}

// The order in which curves are drawn: of stacked ones the tallest first, so that the others stand before it.
function orderOf({ panel, stacked }) {
  const order = panel.curves.map((_, i) => i)
  return stacked ? order.reverse() : order
}

function columnsOf(one) {
  const { panel, xs, stacked } = one
  const values = stacked ? stack(panel.curves) : panel.curves.map((curve) => curve.values)
  return [xs, ...orderOf(one).map((i) => values[i])]
}

// Arrow keys move the cursor by one iteration, in all figures at once.
function step(event, one) {
  const { plot, xs } = one
  const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }
  if (!(event.key in moves)) return
  event.preventDefault()
  const from = plot.cursor.idx ?? (event.key === "ArrowLeft" ? xs.length : -1)
  const to = Math.max(0, Math.min(xs.length - 1, from + moves[event.key]))
  plot.setCursor({ left: plot.valToPos(xs[to], "x"), top: 1 })
}

function limits(low, high, fromZero) {
  if (low == null) return [0, 1]
  if (fromZero || (low >= 0 && low < 0.35 * high)) return [0, high > 0 ? high * 1.06 : 1]
  const room = (high - low || Math.abs(high) || 1) * 0.08
  return [low - room, high + room]
}

function tickText(tick) {
  const size = Math.abs(tick)
  if (size >= 1e4 || (size > 0 && size < 1e-3)) return number(tick, 0) === "0" ? tick.toExponential(0).replace("-", MINUS) : compact(tick)
  return (tick < 0 ? MINUS : "") + String(Number(size.toPrecision(4)))
}

function compact(tick) {
  return tick.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 }).replace("-", MINUS)
}

function stack(curves) {
  const sums = []
  let below = curves[0].values.map(() => 0)
  for (const { values } of curves) {
    below = values.map((value, i) => below[i] + (value ?? 0))
    sums.push(below)
  }
  return sums
}
