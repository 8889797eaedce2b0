// The table of decisions: a click on a heading sorts, a click on a row (or Enter on it) chooses its activation.
function render({ model, el }) {
  const box = document.createElement("div");
  box.className = "acwb-table";
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  const body = table.createTBody();
  box.append(table);
  el.append(box);
  let order = { column: "MiB", down: true };

  function drawn() {
    const rows = [...model.get("rows")];
    const columns = rows.length ? Object.keys(rows[0]) : [];
    const sign = order.down ? -1 : 1;
    rows.sort((a, b) => {
      const [x, y] = [a[order.column], b[order.column]];
      return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
    });
    head.replaceChildren(...columns.map(heading));
    body.replaceChildren(...rows.map((row) => line(row, columns)));
  }

  function heading(column) {
    const cell = document.createElement("th");
    const button = document.createElement("button");
    button.textContent = column + (column === order.column ? (order.down ? " ▾" : " ▴") : "");
    button.onclick = () => {
      order = { column, down: column === order.column ? !order.down : true };
      drawn();
    };
    cell.append(button);
    return cell;
  }

  function line(row, columns) {
    const line = document.createElement("tr");
    line.tabIndex = 0;
    line.dataset.activation = row.activation;
    line.setAttribute("aria-selected", String(row.activation === model.get("selected")));
    for (const column of columns) {
      const cell = line.insertCell();
      cell.textContent = typeof row[column] === "number" ? row[column].toLocaleString("en") : row[column];
      if (typeof row[column] === "number") cell.className = "number";
    }
    const choose = () => {
      model.set("selected", row.activation);
      model.save_changes();
    };
    line.onclick = choose;
    line.onkeydown = (event) => {
      if (event.key === "Enter") choose();
    };
    return line;
  }

  function marked() {
    for (const line of body.rows) {
      line.setAttribute("aria-selected", String(line.dataset.activation === model.get("selected")));
    }
  }

  model.on("change:rows", drawn);
  model.on("change:selected", marked);
  drawn();
}

export default { render };
