// What a person decides about a run. Needs the token that the board has printed; without it the page only shows.

const TOKEN = "cairn-token"

// The token comes in the address, after #, which no browser sends anywhere; it stays with this browser.
function offerToken() {
  const given = /^#token=([\w-]+)$/.exec(location.hash)
  if (!given) return
  localStorage.setItem(TOKEN, given[1])
  history.replaceState(null, "", location.pathname)
}

async function act(action, values) {
  const source = document.documentElement.dataset.source
  const token = localStorage.getItem(TOKEN) ?? ""
  const response = await fetch(`${source}/${action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
    body: JSON.stringify(values),
  })
  if (response.status === 401) localStorage.removeItem(TOKEN)
  return answerOf(response)
}

const ACTIONS = {
  approve: { title: "Approve", fields: ["why"], does: "The run continues." },
  reject: { title: "Reject", fields: ["why"], does: "The run's driver ends; nothing committed is lost." },
  cancel: { title: "Cancel", fields: [], does: "The driver ends in order; nothing committed is lost, and the run can be resumed." },
  fork: { title: "Fork here", fields: ["iteration", "name", "options", "why"], does: "Creates a run that shares the iterations up to this one, and copies nothing." },
}
const FIELDS = {
  why: { label: "Why", hint: "recorded in the ledger", tag: "input" },
  iteration: { label: "Last shared iteration", hint: "the one last pointed at in a curve, else the newest", tag: "input", type: "number", min: "0" },
  name: { label: "Name of the new run", tag: "input" },
  options: { label: "Changed options, one a line", hint: "training.lr=1e-5", tag: "textarea", rows: "3" },
}

// The buttons for what can be done now: { allowed: [...], iteration, name }.
function offerActions(offered) {
  const home = find("#actions")
  const token = localStorage.getItem(TOKEN)
  const button = (action) => {
    const { title, does } = ACTIONS[action]
    return make("button", { type: "button", class: action, disabled: !token, title: token ? does : "Read-only: open the address with the token that the board printed at its start", onclick: () => ask(action, offered) }, title)
  }
  const key = JSON.stringify([offered.allowed, Boolean(token)])
  if (home.dataset.key === key) return Object.assign(latest, offered)
  home.dataset.key = key
  Object.assign(latest, offered)
  home.replaceChildren(...offered.allowed.map(button), ...(token || !offered.allowed.length ? [] : [make("small", {}, "read-only")]))
}
const latest = {}

function ask(action) {
  const { title, fields, does } = ACTIONS[action]
  const dialog = find("#ask")
  const filled = { iteration: pointed ?? latest.iteration, name: latest.name }
  const inputs = Object.fromEntries(
    fields.map((name) => {
      const { tag, label, hint, ...attributes } = FIELDS[name]
      const input = make(tag, { ...attributes, name, placeholder: hint ?? null, autocomplete: "off", required: ["iteration", "name"].includes(name) })
      input.value = filled[name] ?? ""
      return [name, { input, row: make("label", {}, label, input) }]
    }),
  )
  const outcome = make("p", { role: "status" })
  const go = make("button", { type: "submit", class: action }, title)
  const form = make("form", {}, make("h2", {}, `${title}: ${latest.run}`), make("p", { class: "hint" }, does), ...Object.values(inputs).map(({ row }) => row), outcome, make("menu", {}, make("button", { type: "button", onclick: () => dialog.close() }, "Close"), go))
  form.addEventListener("submit", async (event) => {
    event.preventDefault()
    go.disabled = true
    outcome.className = "note"
    outcome.textContent = "…"
    try {
      const answer = await act(action, Object.fromEntries(Object.entries(inputs).map(([name, { input }]) => [name, input.value])))
      const link = answer.run && answer.run !== latest.run ? make("a", { href: `/runs/${answer.run}` }, answer.run) : null
      outcome.replaceChildren(...visible(answer.sentence), link ? " " : "", link ?? "")
      wakeUp()
    } catch (error) {
      outcome.className = "note warning"
      outcome.replaceChildren(...visible(error.message))
      go.disabled = false
    }
  })
  dialog.replaceChildren(form)
  dialog.showModal()
}
